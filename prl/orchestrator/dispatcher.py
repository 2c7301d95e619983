"""Starts rollouts: which, how many, at which policy version; cancels those that would come too late.

Evaluations go first: while rollouts of theirs wait, none of training starts (those in flight go on).

A member of a group carries the version and the cache salt of its own start, so that two members on either
side of a weight update never share cached keys and values. Each started episode becomes exactly one
`Outcome` in the inbox, except when the run drains.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from prl.orchestrator.concurrency import Limit
from prl.orchestrator.episodes import GRACE, Group, Outcome, RolloutSource, audit, failed_rollout
from prl.orchestrator.eval_epoch import no_evals
from prl.orchestrator.eval_flights import EvalFlights
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.staleness import age_at, is_stale, may_start
from prl.records import Episode, PolicySpan

log = logging.getLogger(__name__)

TICK = 1.0
ERROR_PAUSE = 1.0
"""Seconds for which nothing starts after a failure while nothing but failures arrives."""
STRAGGLER_FACTOR = 3.0
"""An episode that runs so many times longer than others is not waited for before new ones start."""


@dataclass(eq=False, slots=True)
class _Flight:
    """One episode in flight. `start`: policy version, None when a frozen model samples; `started_at`: seconds
    since the epoch; `clock`: the same moment on the event loop's clock."""

    group: Group
    start: int | None
    started_at: float
    clock: float
    task: asyncio.Task[None] = field(init=False)


class Dispatcher:
    """Keeps up to `limit.cap` episodes in flight while the policy is new enough for the batch at hand.

    `arrive(episode)` is awaited within the permit of an episode: its scoring counts as work in flight, and so
    do the `settling()` rollouts whose group is being worked on, lest they pile up. `queued()` traces wait for
    a batch. `fatal`: exceptions of a rollout that end the run; all others become failed episodes.
    `tasks_per_minute` bounds how fast groups open. `evals` share the limit and go first.
    """

    def __init__(
        self,
        sources: Mapping[str, RolloutSource],
        mixer: TaskMixer,
        pipeline: Pipeline,
        *,
        limit: Limit,
        bound: int,
        batch_size: int,
        inbox: asyncio.Queue[Outcome],
        arrive: Callable[[Episode], Awaitable[None]],
        settling: Callable[[], int],
        queued: Callable[[], int],
        fatal: tuple[type[Exception], ...] = (),
        attempt: int = 1,
        tasks_per_minute: float | None = None,
        evals: EvalFlights | None = None,
    ) -> None:
        self._sources = sources
        self._mixer = mixer
        self._pipeline = pipeline
        self._limit = limit
        self._bound = bound
        self._batch_size = batch_size
        self._inbox = inbox
        self._arrive = arrive
        self._settling = settling
        self._queued = queued
        self._fatal = fatal
        self._attempt = attempt
        self._task_seconds = 60.0 / tasks_per_minute if tasks_per_minute else 0.0
        self._next_task_at = -math.inf
        self._evals = evals or EvalFlights(no_evals(), pipeline)
        self._open: deque[Group] = deque()
        self._flights: set[_Flight] = set()
        self._failures_in_a_row = 0
        self._rest_until = 0.0
        self._typical_seconds: float | None = None
        self.cancelled: Counter[str] = Counter()
        self.errored: Counter[str] = Counter()

    @property
    def inflight(self) -> int:
        """Episodes of training in flight."""
        return len(self._flights)

    @property
    def all_inflight(self) -> int:
        """Episodes in flight, those of evaluations included."""
        return len(self._flights) + self._evals.inflight

    async def run(self) -> None:
        """Start episodes until the run drains, those of evaluations until cancelled.

        Raises what a rollout or a scoring hook raised fatally.
        """
        async with asyncio.TaskGroup() as tasks:
            while self._evals.wanted or not self._pipeline.draining:
                while self._has_room() and self._evals.may_start():
                    self._evals.start(tasks)
                while self._may_start():
                    self._start(tasks)
                if self._pipeline.draining:
                    self._cancel_all()
                await self._pipeline.wait(self._pause())
            self._cancel_all()

    def shed(self, count: int) -> None:
        """Cancel the youngest `count` episodes of training: the engines are overloaded."""
        youngest = sorted(self._flights, key=lambda flight: flight.clock)[-count:] if count > 0 else []
        for flight in youngest:
            self._drop(flight)
        if youngest:
            log.info("cancelled %d rollouts: the engines are overloaded", len(youngest))
            self._pipeline.notify()

    def cancel_stale(self) -> int:
        """Cancel what would be too old for any batch still to come. Call it before the engines pause."""
        step, bound = self._pipeline.step, self._bound
        late = [flight for flight in self._flights if is_stale(self._span(flight), step, bound)]
        for flight in late:
            self._drop(flight)
        if late:
            log.info("cancelled %d rollouts older than %d steps", len(late), bound)
            self._pipeline.notify()
        return len(late)

    def take_counts(self) -> dict[str, float]:
        """`dispatcher/*` metrics: what is in flight, and what was cancelled or failed since the last call."""
        spans = filter(None, map(self._span, self._flights))
        ages = [age_at(span, self._pipeline.step).total for span in spans]
        evals = self._evals
        values: dict[str, float] = {
            "dispatcher/inflight/train": self.inflight,
            "dispatcher/inflight/eval": evals.inflight,
            "dispatcher/queued/eval": evals.waiting,
            "dispatcher/mode": float(evals.waiting > 0),
            "dispatcher/cancelled/eval": 0.0,  # nothing cancels them
            "dispatcher/errored/eval": evals.errored.total(),
        }
        if ages:
            values["dispatcher/off_policy/max"] = max(ages)
            values["dispatcher/off_policy/mean"] = sum(ages) / len(ages)
        for name, counts in (("cancelled", self.cancelled), ("errored", self.errored)):
            values[f"dispatcher/{name}/train"] = counts.total()
            values |= {f"dispatcher/{name}/{env}": counts[env] for env in self._sources}
            counts.clear()
        for env, count in evals.errored.items():
            values[f"dispatcher/errored/{env}"] = values.get(f"dispatcher/errored/{env}", 0.0) + count
        evals.errored.clear()
        return values

    def _drop(self, flight: _Flight) -> None:
        """Account for an episode as cancelled, then cancel it: whatever it does, it is not heard again."""
        self._flights.discard(flight)
        self.cancelled[flight.group.env] += 1
        self._inbox.put_nowait(Outcome(flight.group, None))
        flight.task.cancel()

    def _cancel_all(self) -> None:
        unwanted, self._flights = self._flights, set()
        for flight in unwanted:
            flight.task.cancel()

    def _has_room(self) -> bool:
        return self.all_inflight + self._settling() < self._limit.cap

    def _pause(self) -> float:
        """Seconds until it is worth another look though nothing happened."""
        due = self._next_task_at - asyncio.get_running_loop().time()
        return min(TICK, due) if due > 0 else TICK

    def _may_start(self) -> bool:
        line = self._pipeline
        if line.updating or line.draining or self._evals.waiting or not self._has_room():
            return False
        now = asyncio.get_running_loop().time()
        if now < self._rest_until or (not self._open and now < self._next_task_at):
            return False
        # A group that was begun is finished; only a new one must still find room in a batch.
        ahead = 0 if self._open else self._batches_at_hand()
        return may_start(line.step, line.version, self._bound, ahead)

    def _batches_at_hand(self) -> int:
        """Batches that the rollouts in flight and in the queue will fill, stragglers not counted."""
        flights = len(self._flights)
        if self._typical_seconds is not None:
            late = asyncio.get_running_loop().time() - STRAGGLER_FACTOR * self._typical_seconds
            flights = sum(flight.clock >= late for flight in self._flights)
        return (flights + self._settling() + self._queued()) // self._batch_size

    def _start(self, tasks: asyncio.TaskGroup) -> None:
        # An open group goes on before a new one opens: its prompt is in the engine's prefix cache.
        if not self._open:
            self._open.append(self._new_group())
        group = self._open[0]
        group.remaining -= 1
        if not group.remaining:
            self._open.popleft()
        source = self._sources[group.env]
        version = None if source.frozen else self._pipeline.version
        flight = _Flight(group, version, time.time(), asyncio.get_running_loop().time())
        self._flights.add(flight)
        flight.task = tasks.create_task(self._fly(flight, source))

    def _new_group(self) -> Group:
        draw = self._mixer.draw()
        if self._task_seconds:
            now = asyncio.get_running_loop().time()
            self._next_task_at = max(now, self._next_task_at) + self._task_seconds
        size = self._sources[draw.env].group_size
        return Group(f"{self._attempt}-{draw.index}", draw, size, size)

    async def _fly(self, flight: _Flight, source: RolloutSource) -> None:
        episode = await self._rollout(flight, source)
        if flight not in self._flights:  # cancelled, and the environment did not care
            return
        episode.policy = self._span(flight)
        audit(episode, flight.group)
        await self._arrive(episode)
        if flight in self._flights:
            self._limit.finished(sum(trace.num_tokens for trace in episode.traces), self.all_inflight)
            self._flights.discard(flight)
            self._note_duration(flight)
            self._note_failure(episode)
            self._inbox.put_nowait(Outcome(flight.group, episode))
            self._pipeline.notify()

    async def _rollout(self, flight: _Flight, source: RolloutSource) -> Episode:
        salt = None if flight.start is None else f"v{flight.start}"
        try:
            async with asyncio.timeout(source.timeout + GRACE):
                return await source.run(
                    flight.group.draw.task,
                    group_id=flight.group.id,
                    base_url=source.base_url,
                    model=source.model,
                    sampling=source.sampling,
                    train=True,
                    cache_salt=salt,
                )
        except self._fatal:
            raise
        except Exception as error:
            log.debug("env.%s: rollout failed", flight.group.env, exc_info=error)
            group = flight.group
            return failed_rollout(group.env, group.id, group.draw.task, error, flight.started_at)

    def _note_duration(self, flight: _Flight) -> None:
        seconds = asyncio.get_running_loop().time() - flight.clock
        before = seconds if self._typical_seconds is None else self._typical_seconds
        self._typical_seconds = 0.9 * before + 0.1 * seconds

    def _note_failure(self, episode: Episode) -> None:
        """Count errors; pause starts when nothing else arrives, lest a dead engine be asked without end."""
        errors = [trace.error for trace in episode.traces if trace.error]
        if not errors:
            self._failures_in_a_row = 0
            return
        self.errored[episode.env] += 1
        self._failures_in_a_row += 1
        if self._failures_in_a_row >= self._limit.cap:
            self._rest_until = asyncio.get_running_loop().time() + ERROR_PAUSE
        if self._failures_in_a_row % self._limit.cap == 0:
            log.warning(
                "the last %d rollouts all failed, most recently with %s: %s",
                self._failures_in_a_row, errors[-1].type, errors[-1].message,
            )  # fmt: skip

    def _span(self, flight: _Flight) -> PolicySpan | None:
        return None if flight.start is None else PolicySpan(flight.start, self._pipeline.version)
