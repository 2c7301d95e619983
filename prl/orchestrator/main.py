"""The orchestrator process: connect, restore what was, prove the first weights, then loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prl.algo.samples import BuiltSamples, build_samples
from prl.checkpoint.marker import read_step, step_dir, unmark
from prl.checkpoint.resolve import checkpoints_dir
from prl.config.schema import RlConfig
from prl.env.source import EnvServerDied
from prl.model_path import resolve_model_path
from prl.orchestrator import state
from prl.orchestrator.connect import Connected, connect
from prl.orchestrator.cost import cost_of_model
from prl.orchestrator.dispatcher import GRACE, Dispatcher
from prl.orchestrator.episodes import Outcome
from prl.orchestrator.loop import MainLoop, Parts
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.packing import pack_batch
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.sink import Sink
from prl.orchestrator.traces import TraceLog
from prl.orchestrator.transport import BatchSender
from prl.orchestrator.watcher import Watcher
from prl.orchestrator.wire import encode_shipment
from prl.records import Trace, TrainSample
from prl.run_dir import RunDir
from prl.sync.filesystem import newest_version
from prl.tracking.stream import MetricStream

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 60.0
"""What taking everything down may last; then the process leaves whatever still hangs."""
WORK_THREADS = 2
SWITCH_SECONDS = 0.001


def main(config: RlConfig, run: RunDir, role: str) -> None:
    """Run until v`max_steps` was applied and proven. Raises whatever ended it early."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(orchestrate(config, run))


async def orchestrate(config: RlConfig, run: RunDir) -> None:
    """Batch socket, engine, environments, teachers, saved state, first weights, main loop, in this order."""
    _favour_the_loop()
    resumed = Path(config.run.resume) if config.run.resume else None
    done = read_step(resumed) if resumed else 0
    async with contextlib.AsyncExitStack() as stack:
        outbox = BatchSender(config.cluster.train_ranks, first_step=done + 1)
        stack.callback(outbox.close)
        run.publish_address("orchestrator", outbox.bind())
        connected = await connect(config, run, stack)
        ratios = {name: env.ratio for name, env in config.env.items()}
        mixer = TaskMixer(connected.curricula, ratios, config.seed)
        totals = state.Totals()
        if resumed:
            saved = await asyncio.to_thread(state.load, state.state_path(resumed), done)
            totals = state.restore(saved, mixer, connected.algorithms, config.ckpt.skip_progress)
        parts = _assemble(config, run, connected, mixer, totals, Pipeline(done + 1, done), outbox)
        stack.callback(parts.traces.close)
        await parts.watcher.apply_first(done, config.cluster.start_timeout + config.sync.timeout)
        # What the imports left is here to stay; walking it again in each full collection stops the loop.
        gc.collect()
        gc.freeze()
        log.info("collecting batch %d of %s", done + 1, config.max_steps)
        loop = MainLoop(parts, max_steps=config.max_steps, patience=patience(config), leaving=_leave_by)
        await loop.run()
    log.info("done: v%d was applied and proven", parts.pipeline.version)


def patience(config: RlConfig) -> float:
    """Seconds without any event after which no part can still be at work: each has a time-out of its own."""
    slowest = max(env.timeout for env in config.env.values())
    return slowest + GRACE + config.trainer.dist_timeout + config.sync.timeout


def _assemble(
    config: RlConfig,
    run: RunDir,
    connected: Connected,
    mixer: TaskMixer,
    totals: state.Totals,
    line: Pipeline,
    outbox: BatchSender,
) -> Parts:
    rollout = config.rollout
    traces = TraceLog(run.traces, run.attempt)
    metrics = MetricStream(run.metric_file("orchestrator"), "orchestrator")
    inbox: asyncio.Queue[Outcome] = asyncio.Queue()
    sink = Sink(
        connected.algorithms,
        connected.curricula,
        _sample_builder(config, connected),
        mixer,
        line,
        batch_size=rollout.batch_size,
        bound=rollout.max_off_policy_steps,
        constant=rollout.constant_batch_size,
        record=lambda episode: traces.add(episode, line.step),
    )
    dispatcher = Dispatcher(
        connected.sources,
        mixer,
        line,
        cap=rollout.max_inflight or rollout.batch_size,
        bound=rollout.max_off_policy_steps,
        batch_size=rollout.batch_size,
        inbox=inbox,
        arrive=sink.arrive,
        settling=lambda: sink.settling,
        queued=lambda: sink.queued,
        fatal=(EnvServerDied,),
        attempt=run.attempt,
    )
    watcher = Watcher(
        [connected.engine],
        line,
        newest=lambda: newest_version(run.broadcasts),
        announce=dispatcher.cancel_stale,
        report=metrics.log,
    )
    save = _saver(config, run, mixer, connected, totals)
    return Parts(
        line, dispatcher, sink, inbox, watcher, outbox, traces, metrics, _packer(config), save, totals
    )


def _sample_builder(config: RlConfig, connected: Connected) -> Callable[[str, Trace], BuiltSamples]:
    def build(env: str, trace: Trace) -> BuiltSamples:
        return build_samples(
            trace,
            env=env,
            action_loss=connected.algorithms[env].action_loss,
            temperature=connected.sources[env].sampling["temperature"],
            seq_len=config.trainer.seq_len,
            min_abs_advantage=config.env[env].min_abs_advantage,
        )

    return build


def _packer(config: RlConfig) -> Callable[[int, Sequence[TrainSample]], list[bytes]]:
    cost = cost_of_model(resolve_model_path(config.model))
    ranks = config.cluster.train_ranks

    def pack(step: int, samples: Sequence[TrainSample]) -> list[bytes]:
        packed = pack_batch(samples, ranks=ranks, seq_len=config.trainer.seq_len, cost=cost)
        return [encode_shipment(step, rank, rows) for rank, rows in enumerate(packed)]

    return pack


def _saver(
    config: RlConfig, run: RunDir, mixer: TaskMixer, connected: Connected, totals: state.Totals
) -> Callable[[int], Any]:
    """Writes the orchestrator's part of a checkpoint where one is due, before the batch is shipped: the
    trainer completes the checkpoint after its step and finds this part there."""
    checkpoints = checkpoints_dir(config.ckpt, run)

    def write(step: int, snapshot: dict[str, Any]) -> None:
        directory = step_dir(checkpoints, step)
        unmark(directory)
        state.save(state.state_path(directory), snapshot)

    async def save(step: int) -> None:
        if state.saves_at(step, config.ckpt, config.max_steps):
            await asyncio.to_thread(write, step, state.snapshot(step, totals, mixer, connected.algorithms))

    return save


def _favour_the_loop() -> None:
    """Packing and sample building are Python code: more threads would not be faster, they would only take
    the interpreter from the event loop, and each for up to a switch interval."""
    executor = ThreadPoolExecutor(WORK_THREADS, thread_name_prefix="orchestrator")
    asyncio.get_running_loop().set_default_executor(executor)
    sys.setswitchinterval(SWITCH_SECONDS)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    if importlib.util.find_spec("uvloop") is None:
        return None
    return importlib.import_module("uvloop").new_event_loop


def _leave_by(code: int) -> None:
    """Whatever hangs while things are taken down (an environment that ignores its cancellation), the process
    ends, with the status that the run earned."""
    asyncio.get_running_loop().call_later(SHUTDOWN_SECONDS, os._exit, code)
