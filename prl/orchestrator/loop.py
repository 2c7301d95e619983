"""The main loop: collect a batch, hold it until the trainer is near, ship it, go on.

Rollouts are started, drained and scored by background tasks, so that a held batch stops none of them. All
tasks live in one group: whichever dies ends every wait at once, and with it the run.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from prl.orchestrator.alerts import Alerts
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.episodes import Outcome
from prl.orchestrator.eval_epoch import Evals, no_evals
from prl.orchestrator.lag import LagProbe
from prl.orchestrator.metrics import Values, batch_metrics
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.sink import Entry, Sink
from prl.orchestrator.staleness import may_ship
from prl.orchestrator.state import Totals
from prl.orchestrator.traces import TraceLog
from prl.orchestrator.watcher import Watcher
from prl.orchestrator.window import Window
from prl.records import TrainSample

log = logging.getLogger(__name__)

LOG_SECONDS = 10.0


class Outbox(Protocol):
    """Where batches go; `prl.orchestrator.transport.BatchSender`."""

    async def serve(self) -> None: ...

    async def put(self, step: int, messages: Sequence[bytes]) -> None: ...


class Metrics(Protocol):
    """Where metrics go; `prl.tracking.stream.MetricStream`."""

    def log(self, values: Mapping[str, float | None], step: int | None = None) -> None: ...


@dataclass(frozen=True)
class Parts:
    """What the loop drives. `pack(step, samples)` gives one message per rank and runs in a thread;
    `save(step)` writes the orchestrator's part of checkpoint `step`, where one is due. `services` run beside
    the loop to its end; `gauges()` are logged regularly."""

    pipeline: Pipeline
    dispatcher: Dispatcher
    sink: Sink
    inbox: asyncio.Queue[Outcome]
    watcher: Watcher
    outbox: Outbox
    traces: TraceLog
    metrics: Metrics
    pack: Callable[[int, Sequence[TrainSample]], Sequence[bytes]]
    save: Callable[[int], Awaitable[None]]
    totals: Totals
    evals: Evals = field(default_factory=no_evals)
    services: Mapping[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    gauges: Callable[[], Mapping[str, float]] = dict


class MainLoop:
    """Ships batches up to `max_steps` (None: for ever).

    `patience`: seconds without any event after which the run is given up. `leaving(status)` is called before
    things are taken down: with 0 at the end, with 1 as soon as a part died.
    """

    def __init__(
        self,
        parts: Parts,
        *,
        max_steps: int | None,
        patience: float,
        leaving: Callable[[int], object] = lambda status: None,
        offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._parts = parts
        self._line = parts.pipeline
        self._max_steps = max_steps
        self._patience = patience
        self._leaving = leaving
        self._offload = offload
        self._lag = LagProbe()
        self._alerts = Alerts()
        self._last_ship = 0.0

    async def run(self) -> None:
        """Returns when v`max_steps` was applied and proven. Raises the error of whichever part died first."""
        parts = self._parts
        self._last_ship = asyncio.get_running_loop().time()
        try:
            async with asyncio.TaskGroup() as tasks:
                running: dict[str, Callable[[], Awaitable[None]]] = {
                    "dispatcher": parts.dispatcher.run,
                    "sink": functools.partial(parts.sink.run, parts.inbox),
                    "watcher": parts.watcher.run,
                    "batch socket": parts.outbox.serve,
                    "traces": parts.traces.run,
                    "lag probe": self._lag.run,
                    "log": self._log_regularly,
                    **parts.services,
                }
                background = [tasks.create_task(self._guard(*part)) for part in running.items()]
                await self._guard("main loop", self._train, may_end=True)
                self._leaving(0)
                for task in background:
                    task.cancel()
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            await parts.traces.flush()
            self._log_now()

    async def _train(self) -> None:
        line = self._line
        while self._max_steps is None or line.step <= self._max_steps:
            batch = await self._collect()
            shipped = [entry for entry in batch if entry.built.samples]
            if not shipped:
                log.warning("batch %d: none of %d rollouts carries credit; skipped", line.step, len(batch))
                continue
            await self._until(lambda: may_ship(line.step, line.version), "waiting for the trainer")
            await self._ship(batch, shipped)
        line.draining = True
        line.notify()
        # The last version is applied though nothing samples from it: so it is proven like all others.
        last = self._max_steps
        await self._until(lambda: line.version >= last, f"waiting for the last version, v{last}")
        await self._until(lambda: self._parts.evals.idle, f"waiting for the evaluation of v{last}")

    async def _collect(self) -> list[Entry]:
        batch: list[Entry] | None = None

        def ready() -> bool:
            nonlocal batch
            batch = self._parts.sink.take(self._line.step)
            return batch is not None

        await self._until(ready, "waiting for rollouts")
        assert batch is not None
        return batch

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await self._line.until(condition, self._patience, what)

    async def _ship(self, batch: list[Entry], shipped: list[Entry]) -> None:
        parts, line, step = self._parts, self._line, self._line.step
        clock = asyncio.get_running_loop().time
        start = clock()
        window = parts.sink.take_window()
        samples = [sample for entry in shipped for sample in entry.built.samples]
        messages = await self._offload(parts.pack, step, samples)
        packed = clock()
        parts.totals.add(window)
        await parts.save(step)
        saved = clock()
        await parts.outbox.put(step, messages)
        blocked = line.take_blocked_seconds()
        line.step += 1
        line.notify()
        parts.dispatcher.cancel_stale()
        seconds, self._last_ship = clock() - self._last_ship, clock()
        times = {
            "time/step": seconds,
            "time/pack": packed - start,
            "time/save_ckpt": saved - packed,
            "time/wait_for_policy": blocked,
        }
        await parts.traces.annotate(shipped, step)
        await self._report(step, shipped, window, times)
        for message in self._alerts.of(
            step, taken=len(batch), shipped=len(shipped), window=window, seconds=seconds, blocked=blocked
        ):
            log.warning("step %d: %s", step, message)

    async def _report(self, step: int, shipped: list[Entry], window: Window, times: Values) -> None:
        values = await self._offload(batch_metrics, shipped, window, step)
        values |= times | self._parts.totals.metrics() | self._parts.sink.metrics()
        await self._offload(self._parts.metrics.log, values, step)
        log.info("%s", step_line(step, values, len(shipped)))
        if window.truncated:
            log.warning("step %d: %d samples were cut to the row length", step, window.truncated)

    async def _guard(self, name: str, part: Callable[[], Awaitable[None]], may_end: bool = False) -> None:
        """A part that raises, or ends while it is needed, must not go unnoticed."""
        try:
            await part()
            if not (may_end or self._line.draining):
                raise RuntimeError(f"{name} ended while the run goes on")
        except Exception as error:
            cause = _first_cause(error)
            log.error("%s failed: %s: %s", name, type(cause).__name__, cause)
            self._leaving(1)
            raise

    async def _log_regularly(self) -> None:
        while True:
            await asyncio.sleep(LOG_SECONDS)
            self._log_now()

    def _log_now(self) -> None:
        parts = self._parts
        watcher = {
            "watcher/policy_version": self._line.version,
            "watcher/update_count": parts.watcher.updates,
            "watcher/last_update_weights_time": parts.watcher.last_seconds,
            "watcher/last_wait_for_ckpt_time": parts.watcher.last_wait,
        }
        values = {**parts.dispatcher.take_counts(), **watcher, **self._lag.metrics(), **parts.gauges()}
        parts.metrics.log(values)


def step_line(step: int, values: Values, shipped: int) -> str:
    """One line for the log: quality of what was shipped, failures of what arrived."""
    rewards = [value for name, value in values.items() if _is_agent_reward(name)]
    shown = {
        "reward": sum(rewards) / len(rewards) if rewards else None,
        "turns": values.get("train/agg/effective/num_turns/mean"),
        "off-policy": values.get("off_policy/max"),
        "errors": values.get("train/agg/all/has_error/mean"),
        "cancelled": values.get("train/agg/all/cancelled/mean"),
        "waited": values["time/wait_for_policy"],
    }
    rest = " | ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None)
    return f"step {step} | {values['time/step']:.2f} s | {shipped} rollouts | {rest}"


def _is_agent_reward(name: str) -> bool:
    return name.startswith("train/agg/effective/") and name.endswith("/reward/mean") and name.count("/") == 5


def _first_cause(error: BaseException) -> BaseException:
    """The innermost first error of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
