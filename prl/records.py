"""The typed records that pass from room to room.

The data flows one way: `Episode` (env -> algo) -> `TrainSample` (algo -> packing) -> `MicroBatch`
(packing -> trainer) -> `WeightVersion` (trainer -> engines). Nothing here imports torch or verifiers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

Component = Literal["rl", "ce", "ref_kl"]
"""The three parts of the loss; also the names of the per-token weight streams."""


@dataclass(slots=True)
class Node:
    """One message of a trace; it holds only the tokens that it adds to its parent.

    `logprobs`, `advantages` and `ref_logprobs` have one entry per True in `mask`;
    `token_ids`, `mask`, `is_content` and each of `loss_weights` have one entry per token.
    """

    parent: int | None
    role: str
    sampled: bool
    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    is_content: list[bool] | None = None
    content: str = ""
    advantages: list[float] | None = None
    ref_logprobs: list[float] | None = None
    loss_weights: dict[str, list[float]] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        return sum(self.mask)


@dataclass(slots=True)
class TraceError:
    """Why a trace cannot be trained on. `type` is the name under which it is counted.

    `status` is the HTTP status of an engine that refused, where that is the reason.
    """

    type: str
    message: str = ""
    status: int | None = None


@dataclass(slots=True)
class Trace:
    """What one agent did in one episode: a forest of messages with its rewards.

    `branches` are root-to-leaf paths (indices into `nodes`) that may be trained on, in order.
    """

    id: str
    agent: str
    nodes: list[Node]
    branches: list[list[int]]
    reward: float | None
    agent_trainable: bool = True
    rewards: dict[str, float | None] = field(default_factory=dict)
    metrics: dict[str, float | None] = field(default_factory=dict)
    error: TraceError | None = None
    is_truncated: bool = False
    is_completed: bool = False
    stop_condition: str | None = None
    num_turns: int = 0
    timing: dict[str, float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens over all nodes, each counted once."""
        return sum(node.num_sampled for node in self.nodes)

    @property
    def num_tokens(self) -> int:
        return sum(len(node.token_ids) for node in self.nodes)

    @property
    def trainable(self) -> bool:
        """No error, a trainable agent, a finite reward and at least one sampled token."""
        return (
            self.error is None
            and self.agent_trainable
            and self.reward is not None
            and math.isfinite(self.reward)
            and self.num_sampled > 0
        )

    @property
    def advantage(self) -> float | None:
        """Mean of the non-zero token advantages; 0.0 if all are zero; None if never assigned."""
        values = [a for node in self.nodes for a in node.advantages or ()]
        if not values:
            return None
        live = [a for a in values if a != 0.0]
        return sum(live) / len(live) if live else 0.0


@dataclass(slots=True)
class PolicySpan:
    """Policy versions current when an episode started and when it ended (0 = initial weights)."""

    start: int
    end: int


@dataclass(slots=True)
class Episode:
    """One run of one task in one environment. `policy` is None when a frozen model sampled it."""

    id: str
    env: str
    group_id: str
    task_key: str
    task: dict[str, Any]
    traces: list[Trace]
    policy: PolicySpan | None = None
    started_at: float = 0.0
    finished_at: float = 0.0

    @property
    def trainable_traces(self) -> list[Trace]:
        return [trace for trace in self.traces if trace.trainable]


@dataclass(slots=True)
class TrainSample:
    """One branch as flat per-token lists, all of the branch's length.

    `logprobs` is 0.0 where `mask` is False. A stream that is None is absent: an absent `rl_weights`
    means 1 wherever `mask` is True, an absent `ce_weights` or `ref_kl_weights` means 0 everywhere.
    """

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env: str
    trace_id: str
    advantages: list[float] | None = None
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class MicroBatch:
    """One packed row of `n` tokens. `sequence_lengths` segments loss and attention; it sums to `n`.

    `envs` and `trace_ids` have one entry per sequence. Padding, if any, is the last sequence, with
    env "" and trace id "". Streams follow `TrainSample`.
    """

    input_ids: list[int]
    position_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    temperatures: list[float]
    sequence_lengths: list[int]
    envs: list[str]
    trace_ids: list[str]
    ref_logprobs: list[float] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published set of policy weights, with the proof of what it holds."""

    version: int
    path: str
    fingerprint: str
    num_bytes: int
