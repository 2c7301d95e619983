"""Group statistics and how credit is written onto traces.

Rewards are rounded to float32 before they are compared, so rewards that differ by rounding only are equal.
Statistics are taken around the smallest value with exact sums (`math.fsum`) and rounded to float32 once:
equal rewards give advantages of exactly 0, and the order of a group does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from prl.records import Component, Episode, Node, Trace


def trainable_traces(episodes: Iterable[Episode]) -> list[Trace]:
    """Traces that enter group statistics: errored ones and ones without a finite reward never do."""
    return [trace for episode in episodes for trace in episode.trainable_traces]


def reward_of(trace: Trace) -> float:
    """Reward of a trainable trace, in float32."""
    assert trace.reward is not None, f"trace {trace.id} has no reward"
    return float(np.float32(trace.reward))


def weighted_mean(values: Sequence[float], weights: Sequence[float] | None = None) -> float:
    """Mean of the values in float64; `weights` must have a positive sum."""
    weights = [1.0] * len(values) if weights is None else weights
    lowest = min(values)
    above = math.fsum(w * (v - lowest) for w, v in zip(weights, values, strict=True))
    return lowest + above / math.fsum(weights)


def centered(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Values minus their (weighted) mean, rounded to float32; exactly 0 where all values are equal."""
    mean = weighted_mean(values, weights)
    return [float(np.float32(value - mean)) for value in values]


def assign_advantage(trace: Trace, value: float | Sequence[float]) -> None:
    """Gives the sampled tokens of `trace` their advantages.

    A scalar goes to every sampled token; a sequence has one entry per sampled token, in node order.
    Raises ValueError when a sequence has another length or a mask does not fit its node.
    """
    for node in trace.nodes:
        _check_mask(trace, node)
    total = trace.num_sampled
    values = [float(value)] * total if isinstance(value, int | float) else [float(entry) for entry in value]
    if len(values) != total:
        raise ValueError(f"trace {trace.id}: {len(values)} advantages for {total} sampled tokens")
    start = 0
    for node in trace.nodes:
        if node.num_sampled:
            node.advantages = values[start : start + node.num_sampled]
            start += node.num_sampled


def weigh_sampled(trace: Trace, component: Component, weight: float) -> None:
    """Writes `weight` on every sampled token's stream of one component, and 0 on the node's other tokens."""
    for node in trace.nodes:
        if node.num_sampled:
            node.loss_weights[component] = [weight if sampled else 0.0 for sampled in node.mask]


def _check_mask(trace: Trace, node: Node) -> None:
    if len(node.mask) != len(node.token_ids):
        raise ValueError(
            f"trace {trace.id}: {node.role} node has {len(node.token_ids)} tokens, a mask of {len(node.mask)}"
        )
