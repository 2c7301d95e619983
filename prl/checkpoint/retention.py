"""Which checkpoints there are, which are kept, and what becomes of those of an abandoned timeline."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from prl.checkpoint.marker import is_complete, is_marked, step_dir, step_dirs, unmark

logger = logging.getLogger(__name__)

ABANDONED = "abandoned"
GIB = 2**30


def complete_steps(checkpoints: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    return [step for step, directory in step_dirs(checkpoints).items() if is_complete(directory)]


def prune(checkpoints: Path, newest: int, keep_last: int | None, keep_interval: int | None) -> list[int]:
    """Delete what is no longer kept, after step `newest` was completed; returns the deleted steps.

    Kept: `newest`, the newest `keep_last` complete steps and the multiples of `keep_interval`; every
    complete step if neither is given. Half-written steps older than `newest` always go. Steps above
    `newest`, and damaged ones, are neither counted nor touched. Raises ValueError if `newest` is not
    complete: nothing is deleted before its successor exists.
    """
    steps = {step: path for step, path in step_dirs(checkpoints).items() if step <= newest}
    complete = [step for step, path in steps.items() if is_complete(path)]
    if newest not in complete:
        raise ValueError(f"old checkpoints are deleted only after step {newest} is complete, and it is not")
    kept = _kept(complete, keep_last, keep_interval)
    half_written = [step for step, path in steps.items() if not is_marked(path)]
    doomed = sorted({*half_written, *complete} - kept)
    for step in doomed:
        delete(steps[step])
    return doomed


def _kept(complete: list[int], keep_last: int | None, keep_interval: int | None) -> set[int]:
    if keep_last is None and keep_interval is None:
        return set(complete)
    last = set(complete[-(keep_last or 1) :])
    return last | {step for step in complete if keep_interval and step % keep_interval == 0}


def delete(directory: Path) -> None:
    """Delete a step directory, its marker first: a deletion cut short leaves nothing to resume from."""
    unmark(directory)
    shutil.rmtree(directory)


def set_aside(checkpoints: Path, after: int) -> list[int]:
    """Clear the way for a run that resumes at step `after`; returns the steps that were in it.

    A later finished step belongs to a timeline that this run leaves: it moves to `abandoned/step_N`,
    replacing an older one there, so that it is neither resumed from nor mixed with new parts. A later
    half-written step is deleted. To be called by one process, before the run's roles start.
    """
    later = {step: path for step, path in step_dirs(checkpoints).items() if step > after}
    for step, directory in later.items():
        if not is_marked(directory):
            delete(directory)
            continue
        target = step_dir(checkpoints / ABANDONED, step)
        if target.exists():
            delete(target)
        target.parent.mkdir(exist_ok=True)
        directory.rename(target)
        logger.warning("checkpoint of step %d is of an abandoned timeline: moved to %s", step, target)
    return list(later)


def disk(path: Path) -> dict[str, float]:
    """`system/ckpt_disk_*` of the volume that holds `path`, or will hold it."""
    while not path.exists():
        path = path.parent
    usage = shutil.disk_usage(path)
    return {
        "system/ckpt_disk_free_gib": usage.free / GIB,
        "system/ckpt_disk_used_gib": usage.used / GIB,
        "system/ckpt_disk_total_gib": usage.total / GIB,
        "system/ckpt_disk_free_ratio": usage.free / usage.total,
    }
