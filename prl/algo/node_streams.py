"""Per-node lists of a branch, spread to one value per token of the branch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from prl.records import Component, Node, Trace

COMPONENTS: tuple[Component, ...] = get_args(Component)


@dataclass(slots=True)
class NodeStreams:
    """Nodes of one branch, each with whether it is trained here (True) or is context only (False)."""

    trace: Trace
    nodes: list[tuple[Node, bool]]

    def mask(self) -> list[bool]:
        """True on the sampled tokens that are trained here."""
        return [sampled and trained for node, trained in self.nodes for sampled in node.mask]

    def compact(self, read: Callable[[Node], Sequence[float] | None]) -> list[float] | None:
        """Values that nodes hold per sampled token, 0.0 elsewhere; None if no trained node holds any.

        Raises ValueError when some trained nodes hold values and others do not.
        """
        holders = [bool(read(node)) for node, trained in self.nodes if trained and node.num_sampled]
        if not any(holders):
            return None
        if not all(holders):
            raise ValueError(f"trace {self.trace.id}: some sampled messages were scored and others were not")
        spread: list[float] = []
        for node, trained in self.nodes:
            values = iter((read(node) or ()) if trained else ())
            spread += [float(next(values)) if sampled and trained else 0.0 for sampled in node.mask]
        return spread

    def weights(self, component: Component) -> list[float] | None:
        """Weight stream of one component; None if no node has one. A node without one has the default."""
        if not any(component in node.loss_weights for node, _ in self.nodes):
            return None
        spread: list[float] = []
        for node, trained in self.nodes:
            default = [float(sampled) if component == "rl" else 0.0 for sampled in node.mask]
            own = node.loss_weights.get(component, default)
            spread += [float(weight) if trained else 0.0 for weight in own]
        return spread


def check_node(trace: Trace, node: Node, *, logprobs_required: bool) -> None:
    """Raises ValueError when a list of the node does not fit its tokens.

    Logprobs may be absent (empty) where they are not required: a teacher need not report its own.
    """
    tokens, sampled = len(node.token_ids), node.num_sampled
    lengths = {"mask": (len(node.mask), tokens)}
    if node.logprobs or logprobs_required:
        lengths["logprobs"] = (len(node.logprobs), sampled)
    for name, values in (("advantages", node.advantages), ("ref_logprobs", node.ref_logprobs)):
        if values is not None:
            lengths[name] = (len(values), sampled)
    for stream, weights in node.loss_weights.items():
        if stream not in COMPONENTS:
            raise ValueError(f"trace {trace.id}: unknown loss component {stream!r}; choose of {COMPONENTS}")
        lengths[f"{stream} weights"] = (len(weights), tokens)
    for name, (got, expected) in lengths.items():
        if got != expected:
            raise ValueError(f"trace {trace.id}: a {node.role} node has {got} {name}, {expected} are needed")
