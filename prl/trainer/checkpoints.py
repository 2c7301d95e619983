"""When the trainer saves, and how a checkpoint becomes complete."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from prl.checkpoint.load import load_trainer
from prl.checkpoint.marker import PARTS, mark_complete, step_dir
from prl.checkpoint.retention import prune
from prl.checkpoint.save import save_trainer
from prl.config.training import CkptConfig
from prl.run_dir import POLL_SECONDS
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
) -> None:
    """Save after `step`, wait for the orchestrator's part if it is one of `parts`, mark complete, prune.

    Collective. Raises TimeoutError if the orchestrator's part does not come within `timeout` seconds.
    """
    directory = step_dir(checkpoints, step)
    progress = {"step": step, "schedule_start": engine.schedule_start}
    save_trainer(engine.deepspeed, directory / "trainer", progress)
    if engine.world.rank == 0:
        if "orchestrator" in parts:
            _wait_for(directory / ORCHESTRATOR_STATE, timeout)
        mark_complete(directory, parts)
        prune(checkpoints, step, ckpt.keep_last, ckpt.keep_interval)
        log.info("checkpoint of step %d is complete: %s", step, directory)
    dist.barrier()


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
