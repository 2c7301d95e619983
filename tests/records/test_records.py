"""What the records say about themselves."""

from __future__ import annotations

import math

import pytest

from prl.records import Node, Trace, TraceError


def node(mask: list[bool], advantages: list[float] | None = None) -> Node:
    sampled = any(mask)
    return Node(
        parent=None,
        role="assistant" if sampled else "user",
        sampled=sampled,
        token_ids=list(range(len(mask))),
        mask=mask,
        logprobs=[-0.5] * sum(mask),
        advantages=advantages,
    )


def trace(*nodes: Node, **fields: object) -> Trace:
    settings: dict = {"id": "t", "agent": "agent", "branches": [list(range(len(nodes)))], "reward": 1.0}
    return Trace(nodes=list(nodes), **{**settings, **fields})


def test_counts_tokens_of_every_node_once() -> None:
    counted = trace(node([False, False]), node([False, True, True]))
    assert (counted.num_tokens, counted.num_sampled) == (5, 2)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"reward": 0.0}, True),
        ({"reward": None}, False),
        ({"reward": math.nan}, False),
        ({"reward": math.inf}, False),
        ({"error": TraceError("RewardError")}, False),
        ({"agent_trainable": False}, False),
    ],
)
def test_trainable_needs_a_finite_reward_a_trainable_agent_and_no_error(fields: dict, expected: bool) -> None:
    assert trace(node([True]), **fields).trainable is expected


def test_a_trace_without_sampled_tokens_is_not_trainable() -> None:
    assert not trace(node([False, False])).trainable


@pytest.mark.parametrize(
    ("advantages", "expected"),
    [(None, None), ([0.0, 0.0], 0.0), ([0.0, 0.5], 0.5), ([0.25, 0.75], 0.5)],
)
def test_reported_advantage_is_the_mean_of_the_tokens_with_credit(
    advantages: list[float] | None, expected: float | None
) -> None:
    assert trace(node([True, True], advantages)).advantage == expected
