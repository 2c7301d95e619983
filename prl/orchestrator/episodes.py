"""What the dispatcher hands on: groups, their outcomes, and the checks an episode passes before it counts."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from prl.env.convert import failed_episode, find_fault, mark_failed
from prl.orchestrator.mixing import Draw, Task
from prl.records import Episode, Trace, TraceError

GRACE = 30.0
"""Seconds beyond an environment's own time-out after which an episode is given up."""


@dataclass(frozen=True)
class RolloutSource:
    """One environment as the dispatcher sees it: how to run an episode, and whom it samples from.

    `run` is `prl.env.source.EnvSource.run`. `frozen`: a model that never changes samples, so there is no
    cache salt and episodes do not age.
    """

    env: str
    run: Callable[..., Awaitable[Episode]]
    group_size: int
    sampling: dict[str, Any]
    timeout: float
    base_url: str
    model: str
    frozen: bool = False


@dataclass(eq=False, slots=True)
class Group:
    """The rollouts of one drawn task; `remaining` of `size` were not started yet."""

    id: str
    draw: Draw
    size: int
    remaining: int

    @property
    def env(self) -> str:
        return self.draw.env


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one started episode ended: with an episode (maybe a failed one), or cancelled as stale (None)."""

    group: Group
    episode: Episode | None


def failed_rollout(env: str, group_id: str, task: Task, error: Exception, started_at: float) -> Episode:
    """An episode for a rollout that gave none, so that it is counted by the type of its error."""
    return failed_episode(
        TraceError(type(error).__name__, str(error)),
        env=env,
        group_id=group_id,
        task_key=task.key,
        task=task.data,
        started_at=started_at,
    )


def audit(episode: Episode, group: Group) -> None:
    """Turn silent faults into errors that are counted; one failed trace fails the whole episode.

    Raises ValueError when the environment answered with another task than the one it was given.
    """
    if episode.task_key != group.draw.task.key:
        raise ValueError(
            f"env.{group.env} was given task {group.draw.task.key!r} and returned {episode.task_key!r}"
        )
    for trace in episode.traces:
        trace.error = trace.error or find_fault(trace)
        if trace.error is None and episode.policy is not None:
            trace.error = _logprob_fault(trace)
    if not episode.traces:
        mark_failed(episode, TraceError("EmptyEpisode", "the episode has no trace"))
    elif any(trace.error for trace in episode.traces):
        mark_failed(episode, TraceError("EpisodeFailed", "another trace of the episode failed"))


def _logprob_fault(trace: Trace) -> TraceError | None:
    """What the policy sampled is trained on against its logprobs, so they must be there and be numbers."""
    for node in trace.nodes:
        if len(node.logprobs) != node.num_sampled:
            what = f"{len(node.logprobs)} logprobs for {node.num_sampled} sampled tokens"
            return TraceError("MalformedLogprobs", what)
        if not all(map(math.isfinite, node.logprobs)):
            return TraceError("NonFiniteLogprob", "the engine returned a logprob that is not finite")
    return None
