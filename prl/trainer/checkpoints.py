"""When the trainer saves, and how a checkpoint becomes complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from prl.checkpoint import stop
from prl.checkpoint.load import load_trainer
from prl.checkpoint.marker import PARTS, is_marked, mark_complete, step_dir
from prl.checkpoint.retention import prune
from prl.checkpoint.save import take_snapshot, write_snapshot
from prl.config.training import CkptConfig
from prl.run_dir import POLL_SECONDS, RunDir
from prl.trainer.distributed import World, all_gather_json
from prl.trainer.engine import TrainEngine

log = logging.getLogger(__name__)

ORCHESTRATOR_STATE = Path("orchestrator") / "state.json"


def is_due(ckpt: CkptConfig, step: int, max_steps: int | None) -> bool:
    """Whether the run saves after `step`."""
    return bool(ckpt.interval and step % ckpt.interval == 0) or (ckpt.at_end and step == max_steps)


def save(
    engine: TrainEngine,
    ckpt: CkptConfig,
    checkpoints: Path,
    step: int,
    *,
    parts: Sequence[str] = PARTS,
    timeout: float,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Save after `step`, wait for the orchestrator's part if it is one of `parts`, mark complete, prune.

    With `ckpt.async_save` only a copy is made now; a thread does the rest, and the next save, the next step
    or `engine.close` tells if it failed. `more`: JSON kept beside the progress, that of rank 0 counts.
    Collective. Raises TimeoutError if the orchestrator's part does not come within `timeout` seconds.
    """
    directory = step_dir(checkpoints, step)
    progress = {"step": step, "schedule_start": engine.schedule_start, **(more or {})}
    engine.saver.wait()
    snapshot = take_snapshot(engine.deepspeed, progress, copy=ckpt.async_save)

    def write(group: Any) -> None:
        write_snapshot(snapshot, directory / "trainer", group)
        if engine.world.rank == 0:
            if "orchestrator" in parts:
                _wait_for(directory / ORCHESTRATOR_STATE, timeout)
            mark_complete(directory, parts)
            prune(checkpoints, step, ckpt.keep_last, ckpt.keep_interval)
            log.info("checkpoint of step %d is complete: %s", step, directory)
        dist.barrier(group)

    if ckpt.async_save:
        engine.saver.start(write)
    else:
        write(None)


def save_on_request(
    run: RunDir, world: World, directory: Path, parts: Sequence[str], make: Callable[[], None]
) -> bool:
    """If the launcher asked this run to stop: `make` the checkpoint in `directory` (`.../step_N`), unless it
    is there; whether to train no further.

    Collective: rank 0 looks, so that all ranks stop after the same step. A step of which the orchestrator
    wrote no part is passed over; the next one has it.
    """
    asked = world.rank == 0 and stop.is_requested(run)
    if asked and "orchestrator" in parts:
        asked = (directory / ORCHESTRATOR_STATE).is_file()
    asked, saved = all_gather_json([asked, asked and is_marked(directory)], world)[0]
    if asked and not saved:
        make()
    if asked and world.rank == 0:
        step = int(directory.name.removeprefix("step_"))
        stop.tell_stopped(run, step)
        log.info("stopping after step %d, as asked", step)
    return bool(asked)


def restore(engine: TrainEngine, ckpt: CkptConfig, directory: Path) -> int:
    """Load the checkpoint in `directory` (`.../step_K`) and return K. Collective."""
    step = int(directory.name.removeprefix("step_"))
    progress = load_trainer(engine.deepspeed, directory / "trainer", ckpt)
    engine.start_schedule(step if ckpt.skip_scheduler else progress.get("schedule_start", 0))
    log.info("resumed from %s", directory)
    return step


def _wait_for(file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not file.is_file():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the orchestrator wrote no {file} within {timeout:.0f} s")
        time.sleep(POLL_SECONDS)
