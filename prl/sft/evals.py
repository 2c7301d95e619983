"""Role `evals` of `prl sft`: evaluations on verifiers environments while the trainer goes on.

The trainer publishes the versions at which something is due. One at a time is loaded into the engine, proven,
and evaluated to the end, so that each epoch speaks of one exact version; what became due meanwhile is judged
at the next version there is. Which evaluations are due, their rollouts and their metrics are those of RL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from prl.checkpoint import stop
from prl.config.schema import SftConfig
from prl.env.source import EnvServerDied
from prl.inference.client import ROUTES, EngineAdmin
from prl.orchestrator.endpoints import Endpoint, policy_endpoint
from prl.orchestrator.eval_epoch import Evals
from prl.orchestrator.eval_run import run_epochs
from prl.orchestrator.eval_sources import connect_evals
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.traces import TraceLog
from prl.orchestrator.watcher import POLL_SECONDS, Watcher
from prl.records import WeightVersion
from prl.run_dir import RunDir
from prl.sft.schedule import first_version
from prl.sync.versions import next_version
from prl.tracking.stream import MetricStream

log = logging.getLogger(__name__)

INFLIGHT = 128
"""Rollouts in flight unless `eval.max_inflight` says otherwise."""
STOP_POLL_SECONDS = 0.5


def main(config: SftConfig, run: RunDir, role: str) -> None:
    """Entry point of the role. Returns when the last version was evaluated, or the run stopped on request."""
    if config.max_steps is not None and first_version(config) >= config.max_steps:
        return
    asyncio.run(_main(config, run))


async def _main(config: SftConfig, run: RunDir) -> None:
    async with contextlib.AsyncExitStack() as stack:
        endpoint = await policy_endpoint(config, run)  # type: ignore[arg-type]
        engine = await _connect(config, endpoint, stack)
        sources = await connect_evals(config, run, base_url=endpoint.v1, model=endpoint.model, stack=stack)
        stream = MetricStream(run.metric_file("evals"), "evals")
        stack.callback(stream.close)
        traces = TraceLog(run.traces, run.attempt)
        stack.callback(traces.close)
        evals = Evals(
            sources,
            last=config.max_steps,
            pinned=True,
            report=stream.log,
            record=lambda episode, version: traces.add(episode, version, kind="eval"),
        )
        await Follower(config, run, evals, engine, stream.log, traces.flush).run()


async def _connect(config: SftConfig, endpoint: Endpoint, stack: contextlib.AsyncExitStack) -> EngineAdmin:
    timeout = config.inference.admin_timeout
    engine = EngineAdmin(endpoint.root, timeout, endpoint.headers, endpoint.api_key_var, routes=ROUTES)
    stack.push_async_callback(engine.aclose)
    await engine.wait_ready(endpoint.model, config.inference.ready_timeout)
    return engine


class Follower:
    """Applies published versions and evaluates each."""

    def __init__(
        self,
        config: SftConfig,
        run: RunDir,
        evals: Evals,
        engine: EngineAdmin,
        report: Callable[..., object],
        flush: Callable[[], Awaitable[None]],
    ) -> None:
        """`report(values, version)` gets `sync/*`; `flush` writes the traces of an evaluation."""
        self._config, self._run, self._evals = config, run, evals
        self._flush = flush
        self._inflight = config.eval.max_inflight or INFLIGHT
        self._first = first_version(config)
        self._line = Pipeline(self._first + 1, self._first - 1)
        self._hold = run.broadcasts / ".evaluated"
        self._watcher = Watcher([engine], self._line, newest=self._next, announce=lambda: None, report=report)

    async def run(self) -> None:
        """From the first version to the last one, or until the run was stopped on request."""
        config, evals = self._config, self._evals
        if not await self._apply_next():
            return
        evals.start(
            self._line.version,
            fresh=config.run.resume is None,
            skip_first=config.eval.skip_first_step,
            retrigger=config.eval.retrigger_on_resume,
        )
        await self._evaluate()
        while self._line.version != config.max_steps and await self._apply_next():
            evals.trigger(self._line.version)
            await self._evaluate()
        shutil.rmtree(self._hold, ignore_errors=True)

    async def _evaluate(self) -> None:
        """Do what is due at this version; a stop on request ends it early, and what there is is reported."""
        work = asyncio.create_task(
            run_epochs(self._evals, self._line.version, self._inflight, fatal=(EnvServerDied,))
        )
        while not work.done() and not self._stopped():
            await asyncio.wait([work], timeout=STOP_POLL_SECONDS)
        if work.done():
            await work
        else:
            work.cancel()
            await asyncio.wait([work])
            self._evals.abandon()
        await self._flush()

    async def _apply_next(self) -> bool:
        """Bring the engine to the next version that is due; False if the run was stopped before it came."""
        while not self._stopped():
            found = await asyncio.to_thread(self._next)
            if found is not None and found.version > self._line.version:
                await self._watcher.apply(found)
                return True
            await asyncio.sleep(POLL_SECONDS)
        return False

    def _stopped(self) -> bool:
        return stop.stopped_at(self._run) is not None

    def _next(self) -> WeightVersion | None:
        """The next version to apply, held so that the trainer's clean-up cannot take it away meanwhile."""
        found = next_version(self._run.broadcasts, self._line.version, self._evals.is_due)
        if found is None or found.version <= self._line.version:
            return None
        try:
            return hold(found, self._hold)
        except FileNotFoundError:  # removed a moment ago: a newer one is there
            log.info("v%d was superseded before it could be evaluated", found.version)
            return None


def hold(version: WeightVersion, place: Path) -> WeightVersion:
    """The same version through links of its files in the emptied directory `place`."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in sorted(Path(version.path).iterdir()):
        os.link(file, place / file.name)
    return replace(version, path=str(place))
