"""opsd: on-policy self-distillation; the policy, shown a demonstration, teaches itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prl.algo.base import Algorithm, Services
from prl.algo.reference import attach_reference, fitting
from prl.config.algo import OpsdConfig
from prl.records import Episode, Trace

PLACEHOLDER = "{demonstration}"


class Opsd(Algorithm[OpsdConfig]):
    """The live policy scores demonstration + tokens; the demonstration's own values are dropped."""

    action_loss = "ref_kl"

    def __init__(self, config: OpsdConfig, services: Services) -> None:
        if PLACEHOLDER not in config.template:
            raise ValueError(f"algo.template must contain {PLACEHOLDER}")
        if services.policy_scorer is None or services.render_prefix is None:
            raise ValueError("algo 'opsd' needs the live policy as scorer and a renderer for its prefix")
        super().__init__(config, services)
        self.policy = services.policy_scorer
        self.render_prefix = services.render_prefix

    async def score_episode(self, episode: Episode) -> None:
        demonstration = find_demonstration(episode, self.config.demo_key)
        prefix = self.render_prefix(self.config.template.replace(PLACEHOLDER, demonstration))

        async def score(trace: Trace, branch: int, token_ids: list[int]) -> list[float]:
            # The salt is used once: a prefix cached by the engine would come back without logprobs.
            values = await self.policy.score(prefix + token_ids, cache_salt=f"opsd-{trace.id}-{branch}")
            return values[len(prefix) :]

        traces = fitting(episode.trainable_traces, self.services.longest, len(prefix))
        await attach_reference(traces, score)


def find_demonstration(episode: Episode, key: str) -> str:
    """The task's demonstration: `task["info"][key]`, else `task[key]`. Raises ValueError if absent."""
    info: Any = episode.task.get("info")
    places = [info, episode.task] if isinstance(info, Mapping) else [episode.task]
    for place in places:
        if place.get(key) is not None:
            return str(place[key])
    raise ValueError(
        f"algo 'opsd' finds no {key!r} in task {episode.task_key!r} of environment {episode.env!r} "
        f"(fields: {', '.join(sorted(episode.task))}); set algo.demo_key to the field that holds it"
    )
