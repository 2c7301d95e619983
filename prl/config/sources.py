"""Schema of `env.<name>`: one source of tasks and rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prl.config.fields import opt


@dataclass
class SamplingConfig:
    """How completions are sampled. A null field takes the run's value (`rollout.sampling`)."""

    temperature: float | None = opt(
        None,
        "Sampling temperature, by which the learner divides logits; 0 = greedy, in `prl eval` only.",
        ge=0,
        le=2,
    )
    top_p: float | None = opt(None, "Nucleus sampling (1 = off).", gt=0, le=1)
    top_k: int | None = opt(None, "Top-k sampling (-1 = off).", ge=-1)
    min_p: float | None = opt(
        None, "Least probability, relative to the likeliest token (0 = off).", ge=0, le=1
    )
    max_tokens: int | None = opt(None, "Longest completion of one turn, tokens.", ge=1)
    reasoning_effort: str | None = opt(None, "How long a reasoning model may think, in its provider's words.")
    extra_body: dict[str, Any] = opt(
        factory=dict, doc="Further keys of the request, as the provider names them."
    )


@dataclass
class TaskMatchConfig:
    """Tasks by position or identity; a task matches when any of these names it."""

    idx: list[Any] = opt(factory=list, doc="Positions: integers and slices, as [3,'10:20','100:'].")
    ids: list[str] = opt(factory=list, doc="Their `id`.")
    keys: list[str] = opt(factory=list, doc="Their `key`, as traces record it.")
    names: list[str] = opt(factory=list, doc="Their `name`.")


@dataclass
class SelectConfig:
    """Which tasks: include, exclude, shuffle, skip, limit, in this order. Null = the shared value."""

    include: TaskMatchConfig = opt(factory=TaskMatchConfig, doc="Keep these only; empty = all.")
    exclude: TaskMatchConfig = opt(factory=TaskMatchConfig, doc="Drop these.")
    shuffle: bool | None = opt(None, "Shuffle what is left.")
    seed: int | None = opt(None, "Seed of the shuffle; null = 0.", ge=0)
    skip: int | None = opt(None, "Drop the first so many.", ge=0)
    limit: int | None = opt(None, "Take at most so many; needed for endless tasksets in `prl eval`.", ge=1)


@dataclass
class EnvConfig:
    """One environment. `taskset` and `agents` are handed to verifiers as they are."""

    id: str | None = opt(None, "verifiers taskset id or importable module; null = the environment's name.")
    taskset: dict[str, Any] = opt(factory=dict, doc="Options of the taskset.")
    agents: dict[str, Any] = opt(factory=dict, doc="Options per agent (harness, runtime, max_turns, ...).")
    seats: list[str] | None = opt(None, "Names of its agents, where there are several; null = one agent.")
    select: SelectConfig = opt(factory=SelectConfig, doc="Which of its tasks.")
    ratio: float = opt(1.0, "Share of the groups drawn from here, relative to the other environments.", gt=0)
    group_size: int | None = opt(None, "Rollouts per task; null = `rollout.group_size`.", ge=1)
    sampling: SamplingConfig = opt(factory=SamplingConfig, doc="Overrides of `rollout.sampling`.")
    algo: Any = opt(None, "This environment's own algorithm; null = the run's.")
    curriculum: Any = opt(None, "Which of its tasks comes next; null = the run's.")
    min_abs_advantage: float = opt(0.0, "Tokens with |advantage| up to this earn no credit.", ge=0)
    workers: int = opt(1, "Worker processes of the environment server.", ge=1)
    elastic: bool = opt(False, "Start with one worker and add others as the load asks, up to `workers`.")
    multiplex: int = opt(128, "Rollouts that one worker of an elastic server should carry.", ge=1)
    restarts: int = opt(2, "Times that a dead environment server is started again; then the run ends.", ge=0)
    env_vars: dict[str, str] = opt(factory=dict, doc="Environment variables of its server.")
    timeout: float = opt(300.0, "Seconds one episode may take.", gt=0)
