"""From what the user wrote in `run.resume` to one complete checkpoint directory, once, in the launcher."""

from __future__ import annotations

from pathlib import Path

from prl.checkpoint.marker import step_dir, step_dirs, why_incomplete
from prl.checkpoint.retention import complete_steps
from prl.config.training import CkptConfig
from prl.run_dir import RunDir


def checkpoints_dir(ckpt: CkptConfig, run: RunDir) -> Path:
    """Where the checkpoints of `run` are."""
    return Path(ckpt.dir).expanduser() if ckpt.dir else run.checkpoints


def resolve_resume(value: str | None, checkpoints: Path) -> Path | None:
    """The checkpoint directory that `run.resume` names, or None if it is null.

    `value`: `latest`, a step of the run whose checkpoints are in `checkpoints`, or a checkpoint directory.
    Raises ValueError, listing what there is, if that checkpoint does not exist or is not complete.
    """
    if value is None:
        return None
    if value == "latest":
        if not complete_steps(checkpoints):
            there = _what_there_is(checkpoints)
            remedy = "Leave run.resume out to start; run.clean=true replaces a run that is there."
            raise ValueError(f"run.resume = latest: no complete checkpoint, {there}. {remedy}")
        return latest(checkpoints)
    if value.isdecimal():
        return at_step(checkpoints, int(value))
    directory = Path(value).expanduser().absolute()
    if not directory.is_dir():
        raise ValueError(
            f"run.resume={value}: there is no directory {directory}; {_what_there_is(checkpoints)}"
        )
    if reason := why_incomplete(directory):
        there = _what_there_is(_where_steps_are(directory))
        raise ValueError(f"run.resume={value} is not a complete checkpoint ({reason}); {there}")
    return directory


def latest(checkpoints: Path) -> Path:
    """The newest complete checkpoint. Raises ValueError if there is none."""
    steps = complete_steps(checkpoints)
    if not steps:
        raise ValueError(f"there is no complete checkpoint: {_what_there_is(checkpoints)}")
    return step_dir(checkpoints, steps[-1])


def at_step(checkpoints: Path, step: int) -> Path:
    """The complete checkpoint of `step`. Raises ValueError if there is none."""
    directory = step_dir(checkpoints, step)
    reason = why_incomplete(directory) if directory.is_dir() else "there is no such directory"
    if reason:
        raise ValueError(f"no complete checkpoint of step {step} ({reason}); {_what_there_is(checkpoints)}")
    return directory


def _where_steps_are(directory: Path) -> Path:
    """Where to look for alternatives: the user may have named a run, its checkpoints, or one step."""
    candidates = (directory / "checkpoints", directory, directory.parent)
    return next((place for place in candidates if step_dirs(place)), directory)


def _what_there_is(checkpoints: Path) -> str:
    steps = step_dirs(checkpoints)
    complete = complete_steps(checkpoints)
    unfinished = [step for step in steps if step not in complete]
    found = f"complete steps: {_listed(complete)}" if steps else "no checkpoint at all"
    also = f"; not complete: {_listed(unfinished)}" if unfinished else ""
    return f"{checkpoints} holds {found}{also}"


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) or "none"
