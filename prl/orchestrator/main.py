"""The orchestrator process: connect, restore what was, prove the first weights, then loop."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from prl.checkpoint.marker import read_step
from prl.config.schema import RlConfig
from prl.orchestrator.assemble import assemble
from prl.orchestrator.connect import connect
from prl.orchestrator.episodes import GRACE
from prl.orchestrator.file_transport import FileSender
from prl.orchestrator.loop import MainLoop
from prl.orchestrator.transport import BatchSender
from prl.run_dir import RunDir

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
    favour_the_loop()
    resumed = Path(config.run.resume) if config.run.resume else None
    done = read_step(resumed) if resumed else 0
    async with contextlib.AsyncExitStack() as stack:
        outbox = _outbox(config, run, first_step=done + 1)
        stack.callback(outbox.close)
        run.publish_address("orchestrator", outbox.bind())
        connected = await connect(config, run, stack)
        parts = await asyncio.to_thread(assemble, config, run, connected, outbox, resumed)
        stack.callback(parts.traces.close)
        await parts.watcher.apply_first(done, config.cluster.start_timeout + config.sync.timeout)
        evals = config.eval
        parts.evals.start(
            done, fresh=resumed is None, skip_first=evals.skip_first_step, retrigger=evals.retrigger_on_resume
        )
        forget_the_imports()
        log.info("collecting batch %d of %s", done + 1, config.max_steps)
        loop = MainLoop(parts, max_steps=config.max_steps, patience=patience(config), leaving=_leave_by)
        await loop.run()
    log.info("done: v%d was applied and proven", parts.pipeline.version)


def patience(config: RlConfig) -> float:
    """Seconds without any event after which no part can still be at work: each has a time-out of its own."""
    slowest = max(env.timeout for env in [*config.env.values(), *config.eval.env.values()])
    return slowest + GRACE + config.trainer.dist_timeout + config.sync.timeout


def _outbox(config: RlConfig, run: RunDir, first_step: int) -> BatchSender | FileSender:
    if config.rollout.transport == "filesystem":
        return FileSender(run.batches, config.cluster.train_ranks, first_step)
    return BatchSender(config.cluster.train_ranks, first_step)


def forget_the_imports() -> None:
    """What they left is here to stay; walking it again in each full collection stops the loop."""
    gc.collect()
    gc.freeze()


def favour_the_loop() -> None:
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
