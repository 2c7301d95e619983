"""From finished episodes to a queue of traces with credit: group -> score -> build -> first in, first out.

Nothing too old is handed out: staleness is judged per episode when its group is queued and again at every
batch, the time spent in the queue included.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl.algo.samples import BuiltSamples
from prl.orchestrator.episodes import Group, Outcome
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.staleness import is_stale
from prl.orchestrator.window import GroupReport, Window
from prl.records import Episode, Trace

log = logging.getLogger(__name__)

Offload = Callable[..., Awaitable[Any]]
"""Runs a blocking function off the event loop: `asyncio.to_thread`."""


class Algorithm(Protocol):
    """The hooks of `prl/algo/` that the sink calls. What they raise ends the run."""

    async def score_episode(self, episode: Episode) -> None: ...

    async def score_group(self, episodes: list[Episode]) -> None: ...

    def metrics(self) -> dict[str, float]: ...


class Curriculum(Protocol):
    """What learns from every scored group and may refuse it; `prl.curriculum.Curriculum`."""

    def admit(self, group: Sequence[Episode]) -> bool: ...

    def metrics(self) -> dict[str, float]: ...


@dataclass(eq=False, slots=True)
class Entry:
    """A trace in the queue. One without samples earned no credit and only counts."""

    group: Group
    episode: Episode
    trace: Trace
    built: BuiltSamples


@dataclass(slots=True)
class _OpenGroup:
    """Episodes that arrived, and members accounted for (arrived or cancelled)."""

    episodes: list[Episode] = field(default_factory=list)
    accounted: int = 0


class Sink:
    """Collects groups into training batches of `batch_size` traces.

    `build(env, trace)` makes samples (in a thread); `record(episode)` is told of every arrival. The run ends
    when `max_barren` finished rollouts in a row gave no credit (None: never).
    """

    def __init__(
        self,
        algorithms: Mapping[str, Algorithm],
        curricula: Mapping[str, Curriculum],
        build: Callable[[str, Trace], BuiltSamples],
        mixer: TaskMixer,
        pipeline: Pipeline,
        *,
        batch_size: int,
        bound: int,
        constant: bool,
        record: Callable[[Episode], None],
        max_barren: int | None = None,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        self._algorithms = algorithms
        self._curricula = curricula
        self._build = build
        self._mixer = mixer
        self._pipeline = pipeline
        self._batch_size = batch_size
        self._bound = bound
        self._constant = constant
        self._record = record
        self._offload = offload
        self._open: dict[str, _OpenGroup] = {}
        self._queue: deque[Entry] = deque()
        self._left: Counter[int] = Counter()
        self._settling = 0
        self._swept_for = 0
        self._fruitless = 0
        self._barren = 0
        self._max_barren = max_barren
        self.window = Window()

    @property
    def queued(self) -> int:
        """Traces that wait for a batch."""
        return len(self._queue)

    @property
    def settling(self) -> int:
        """Rollouts of complete groups that are still being scored and made into samples."""
        return self._settling

    async def arrive(self, episode: Episode) -> None:
        """Record an episode and let its algorithm score it (a teacher may be asked)."""
        self._record(episode)
        if episode.trainable_traces:
            await self._algorithms[episode.env].score_episode(episode)

    async def run(self, inbox: asyncio.Queue[Outcome]) -> None:
        """Drain the inbox until cancelled. It never waits for the trainer, so nothing can block on it."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                outcome = await inbox.get()
                if (episodes := self._file(outcome)) is not None:
                    self._settling += len(episodes)
                    tasks.create_task(self._settle(outcome.group, episodes))

    def take(self, step: int) -> list[Entry] | None:
        """The oldest `batch_size` traces that batch `step` may hold, or None while there are too few."""
        self._sweep(step)
        if len(self._queue) < self._batch_size:
            return None
        batch = [self._queue.popleft() for _ in range(self._batch_size)]
        for entry in batch:
            self._left[entry.group.draw.index] -= 1
            self._mixer.settle(entry.group.draw.index)
        self._left = +self._left
        return batch

    def take_window(self) -> Window:
        """What was accounted for since the last call."""
        window, self.window = self.window, Window()
        return window

    def metrics(self) -> dict[str, float]:
        """`curriculum/<env>/*` since the last call, and `algo/<env>/*`."""
        values: dict[str, float] = {}
        for curriculum in self._curricula.values():
            values |= curriculum.metrics()
        for env, algorithm in self._algorithms.items():
            values |= {f"algo/{env}/{name}": value for name, value in algorithm.metrics().items()}
        return values

    def _file(self, outcome: Outcome) -> list[Episode] | None:
        """The episodes of the outcome's group once every member is accounted for."""
        group = self._open.setdefault(outcome.group.id, _OpenGroup())
        group.accounted += 1
        if outcome.episode is not None:
            group.episodes.append(outcome.episode)
        if group.accounted < outcome.group.size:
            return None
        return self._open.pop(outcome.group.id).episodes

    async def _settle(self, group: Group, episodes: list[Episode]) -> None:
        entries: list[Entry] = []
        if not all(map(self._is_stale, episodes)):
            # One that is too old is not trained on, but its reward still tells the baseline of the others.
            if survivors := [episode for episode in episodes if episode.trainable_traces]:
                await self._algorithms[group.env].score_group(survivors)
            if self._curricula[group.env].admit(episodes):
                fresh = [episode for episode in survivors if not self._is_stale(episode)]
                entries = await self._offload(self._entries, group, fresh)
        self._settling -= len(episodes)
        self._admit(group, episodes, entries)
        self._pipeline.notify()

    def _entries(self, group: Group, episodes: list[Episode]) -> list[Entry]:
        return [
            Entry(group, episode, trace, self._build(group.env, trace))
            for episode in episodes
            for trace in episode.trainable_traces
        ]

    def _admit(self, group: Group, episodes: list[Episode], entries: list[Entry]) -> None:
        """Queue what may be trained on. The step may have moved while the group was scored."""
        usable = [entry for entry in entries if entry.built.samples or not self._constant]
        admitted = [entry for entry in usable if not self._is_stale(entry.episode)]
        self._queue.extend(admitted)
        trainable = {entry.trace.id for entry in entries if entry.built.samples}
        queued = {entry.trace.id for entry in admitted}
        cancelled = group.size - len(episodes)
        report = GroupReport.of(group.env, group.draw.task.key, episodes, cancelled, trainable, queued)
        self.window.groups.append(report)
        self.window.void += sum(len(e.trainable_traces) for e in episodes if self._is_stale(e))
        self.window.truncated += sum(entry.built.truncated for entry in entries)
        if admitted:
            self._left[group.draw.index] = len(admitted)
            self._fruitless = 0
        else:
            self._mixer.settle(group.draw.index)
            self._warn_if_fruitless(group.size)
        self._end_if_barren(episodes, fruitful=not trainable.isdisjoint(queued))

    def _sweep(self, step: int) -> None:
        """Drop what is too old for batch `step`; once a step, as newcomers are judged when they come."""
        if step == self._swept_for:
            return
        self._swept_for = step
        stale = [entry for entry in self._queue if is_stale(entry.episode.policy, step, self._bound)]
        if not stale:
            return
        self.window.swept += len(stale)
        gone = set(map(id, stale))
        self._queue = deque(entry for entry in self._queue if id(entry) not in gone)
        for index, count in Counter(entry.group.draw.index for entry in stale).items():
            self._left[index] -= count
            if self._left[index] <= 0:
                self._mixer.settle(index)
        self._left = +self._left

    def _warn_if_fruitless(self, size: int) -> None:
        self._fruitless += size
        if self._fruitless < self._batch_size:
            return
        self._fruitless -= self._batch_size
        log.warning(
            "%d rollouts in a row gave nothing to train on: %s. Credit relative to a group needs rollouts "
            "of different reward (rollout.group_size).", self._batch_size, self.window.reasons(),
        )  # fmt: skip

    def _end_if_barren(self, episodes: list[Episode], fruitful: bool) -> None:
        """What failed or came too late says nothing about the tasks; all others should earn credit."""
        clean = [e for e in episodes if not self._is_stale(e) and not any(trace.error for trace in e.traces)]
        self._barren = 0 if fruitful else self._barren + len(clean)
        if self._max_barren is not None and self._barren >= self._max_barren:
            raise RuntimeError(
                f"{self._barren} rollouts in a row ended well and none gave credit: nothing to train on. "
                "Are the tasks too hard or too easy, or the groups too small (rollout.group_size)? "
                "rollout.max_fruitless_batches=null goes on for ever."
            )

    def _is_stale(self, episode: Episode) -> bool:
        return is_stale(episode.policy, self._pipeline.step, self._bound)
