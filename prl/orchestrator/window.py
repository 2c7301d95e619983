"""What arrived since the last batch was shipped: each rollout is in exactly one window, that of its group.

A window keeps facts, no tokens: when nothing is worth training on it may grow to many thousand rollouts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prl.records import Episode, Trace

COUNTS = ("num_total_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "num_branches")


@dataclass(frozen=True, slots=True)
class Fact:
    """A trace as metrics see it. `reward` is None when none was given; `counts` are those of `COUNTS`.

    `trainable`: it gave samples. `admitted`: it entered the queue.
    """

    agent: str
    agent_trainable: bool
    reward: float | None
    error: str | None
    counts: tuple[int, ...]
    is_truncated: bool
    is_completed: bool
    stop_condition: str | None
    tables: Mapping[str, Mapping[str, float | None]]
    trainable: bool
    admitted: bool

    @classmethod
    def of(cls, trace: Trace, *, trainable: bool, admitted: bool) -> Fact:
        total, sampled = trace.num_tokens, trace.num_sampled
        given = trace.error is None and trace.reward is not None and math.isfinite(trace.reward)
        return cls(
            agent=trace.agent,
            agent_trainable=trace.agent_trainable,
            reward=trace.reward if given else None,
            error=trace.error.type if trace.error else None,
            counts=(total, total - sampled, sampled, trace.num_turns, len(trace.branches)),
            is_truncated=trace.is_truncated,
            is_completed=trace.is_completed,
            stop_condition=trace.stop_condition,
            tables={"timing": trace.timing, "metrics": trace.metrics, "rewards": trace.rewards},
            trainable=trainable,
            admitted=admitted,
        )


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group all of whose members are accounted for: the traces of each episode; `cancelled` left none."""

    env: str
    task_key: str
    episodes: list[list[Fact]]
    cancelled: int

    @classmethod
    def of(
        cls,
        env: str,
        task_key: str,
        episodes: Iterable[Episode],
        cancelled: int,
        trainable: Collection[str] = (),
        admitted: Collection[str] = (),
    ) -> GroupReport:
        """`trainable`, `admitted`: ids of the traces that gave samples, and of those that were queued."""
        facts = [
            [Fact.of(t, trainable=t.id in trainable, admitted=t.id in admitted) for t in episode.traces]
            for episode in episodes
        ]
        return cls(env, task_key, facts, cancelled)

    @property
    def facts(self) -> Iterator[Fact]:
        return (fact for episode in self.episodes for fact in episode)


@dataclass(slots=True)
class Window:
    """Groups in order of completion. `void`: traces that were too old when their group was complete; `swept`:
    traces that became too old in the queue; `truncated`: samples that were cut to the row length."""

    groups: list[GroupReport] = field(default_factory=list)
    void: int = 0
    swept: int = 0
    truncated: int = 0

    @property
    def stale(self) -> int:
        """Traces that were never trained on because of their age."""
        return self.void + self.swept

    @property
    def facts(self) -> Iterator[Fact]:
        return (fact for group in self.groups for fact in group.facts)

    @property
    def num_episodes(self) -> int:
        return sum(len(group.episodes) for group in self.groups)

    @property
    def num_tasks(self) -> int:
        """Different tasks; equal keys of two environments are two tasks."""
        return len({(group.env, group.task_key) for group in self.groups})

    @property
    def num_tokens(self) -> int:
        return sum(fact.counts[0] for fact in self.facts)

    @property
    def cancelled(self) -> int:
        return sum(group.cancelled for group in self.groups)

    def errors(self) -> Counter[str]:
        """Traces by the type of their error."""
        return Counter(fact.error for fact in self.facts if fact.error)

    def discarded_share(self) -> float:
        """Share of the rollouts that gave nothing to train on, whatever the reason."""
        used = sum(fact.trainable and fact.admitted for fact in self.facts)
        total = sum(1 for _ in self.facts) + self.cancelled
        return 1 - max(0, used - self.swept) / total if total else 0.0

    def reasons(self) -> str:
        """Why rollouts were discarded, in words: `3 failed (TimeoutError 3), 16 without credit`."""
        errors = self.errors()
        types = ", ".join(f"{name} {count}" for name, count in errors.most_common())
        idle = sum(fact.error is None and fact.agent_trainable and not fact.trainable for fact in self.facts)
        parts = [
            (errors.total(), f"failed ({types})"),
            (max(0, idle - self.void), "without credit"),
            (self.stale, "too old"),
            (self.cancelled, "cancelled"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count) or "none discarded"
