"""echo: grpo plus cross-entropy on what the environment said, so the policy learns to foresee it."""

from __future__ import annotations

from typing import Any

from prl.algo.base import Services
from prl.algo.grpo import GroupBaseline
from prl.config.algo import EchoConfig
from prl.import_path import load_object
from prl.records import Episode, Node, Trace


class Echo(GroupBaseline[EchoConfig]):
    """ce weight `alpha` of the message's role on each token that the environment gave after turn one."""

    def __init__(self, config: EchoConfig, services: Services) -> None:
        if not config.roles:
            raise ValueError("algo.roles is empty; name at least one role, or use algo=grpo")
        super().__init__(config, services)
        self.alphas = {role: entry.alpha for role, entry in config.roles.items()}
        self.filter = None
        if config.filter is not None:
            self.filter = load_object(config.filter.import_path, "algo.filter.import_path")

    async def score_episode(self, episode: Episode) -> None:
        for trace in episode.trainable_traces:
            kept = self._kept_tokens(trace)
            for number, branch in enumerate(trace.branches):
                self._weigh_branch([trace.nodes[i] for i in branch], kept[number] if kept else None)

    def _weigh_branch(self, nodes: list[Node], kept: list[bool] | None) -> None:
        """Weights of one branch; a node that an earlier branch has weighed keeps the larger weight."""
        start, sampled_before = 0, False
        for node in nodes:
            stop = start + len(node.token_ids)
            if sampled_before and not node.sampled and node.role in self.alphas:
                own = kept[start:stop] if kept else [True] * len(node.token_ids)
                _merge_weights(node, own, self.alphas[node.role])
            sampled_before = sampled_before or node.sampled
            start = stop

    def _kept_tokens(self, trace: Trace) -> list[list[bool]] | None:
        """Tokens that the user's filter leaves, per branch. Raises ValueError on a wrong shape."""
        if self.filter is None or self.config.filter is None:
            return None
        what = f"algo.filter {self.config.filter.import_path!r}, trace {trace.id}"
        kept: Any = self.filter(trace, **self.config.filter.kwargs)
        if len(kept) != len(trace.branches):
            raise ValueError(f"{what}: {len(kept)} lists for {len(trace.branches)} branches")
        for branch, flags in zip(trace.branches, kept, strict=True):
            tokens = sum(len(trace.nodes[i].token_ids) for i in branch)
            if len(flags) != tokens:
                raise ValueError(f"{what}: {len(flags)} flags for a branch of {tokens} tokens")
        return [[bool(flag) for flag in flags] for flags in kept]


def _merge_weights(node: Node, kept: list[bool], alpha: float) -> None:
    attributed = node.is_content is not None and len(node.is_content) == len(node.token_ids)
    content = node.is_content if attributed and node.is_content is not None else [True] * len(node.token_ids)
    before = node.loss_weights.get("ce", [0.0] * len(node.token_ids))
    node.loss_weights["ce"] = [
        max(old, alpha if keep and of_content else 0.0)
        for old, keep, of_content in zip(before, kept, content, strict=True)
    ]
