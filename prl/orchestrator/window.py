"""What arrived since the last batch was shipped: each rollout is in exactly one window, that of its group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from prl.records import Episode, Trace


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group all of whose members are accounted for; `cancelled` members left no episode."""

    env: str
    task_key: str
    episodes: list[Episode]
    cancelled: int


@dataclass(slots=True)
class Window:
    """Groups in order of completion, and what became of their traces (ids)."""

    groups: list[GroupReport] = field(default_factory=list)
    trainable: set[str] = field(default_factory=set)
    admitted: set[str] = field(default_factory=set)
    stale: int = 0
    truncated: int = 0

    def add_group(
        self,
        group: GroupReport,
        *,
        trainable: Iterable[str] = (),
        admitted: Iterable[str] = (),
        stale: int = 0,
        truncated: int = 0,
    ) -> None:
        """`trainable`: traces that give samples; `admitted`: traces that entered the queue; `stale`: traces
        that were too old for it; `truncated`: samples cut to the row length."""
        self.groups.append(group)
        self.trainable.update(trainable)
        self.admitted.update(admitted)
        self.stale += stale
        self.truncated += truncated

    @property
    def episodes(self) -> Iterator[Episode]:
        return (episode for group in self.groups for episode in group.episodes)

    @property
    def traces(self) -> Iterator[Trace]:
        return (trace for episode in self.episodes for trace in episode.traces)

    @property
    def cancelled(self) -> int:
        return sum(group.cancelled for group in self.groups)

    def errors(self) -> Counter[str]:
        """Traces by the type of their error."""
        return Counter(trace.error.type for trace in self.traces if trace.error)

    def discarded_share(self) -> float:
        """Share of the rollouts that gave nothing to train on, whatever the reason."""
        traces = sum(1 for _ in self.traces)
        total = traces + self.cancelled
        return 1 - len(self.trainable & self.admitted) / total if total else 0.0

    def reasons(self) -> str:
        """Why rollouts were discarded, in words: `3 failed (TimeoutError 3), 16 without credit`."""
        errors = self.errors()
        types = ", ".join(f"{name} {count}" for name, count in errors.most_common())
        fine = sum(1 for trace in self.traces if trace.error is None and trace.agent_trainable)
        idle = max(0, fine - len(self.trainable) - self.stale)
        parts = [
            (errors.total(), f"failed ({types})"),
            (idle, "without credit"),
            (self.stale, "too old"),
            (self.cancelled, "cancelled"),
        ]
        return ", ".join(f"{count} {what}" for count, what in parts if count) or "none discarded"
