"""The completion marker: a checkpoint exists when `COMPLETE` does, and what it lists is there.

checkpoints/step_N/trainer/        sharded weights, optimizer, trainer_state.json
checkpoints/step_N/orchestrator/   state.json
checkpoints/step_N/COMPLETE        JSON, written last: step, parts, size of every file in them
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from prl.run_dir import write_atomic

MARKER = "COMPLETE"
PARTS = ("trainer", "orchestrator")

_STEP = re.compile(r"step_(\d+)")


def step_dir(checkpoints: Path, step: int) -> Path:
    """Directory of the checkpoint of `step`."""
    return checkpoints / f"step_{step}"


def step_dirs(checkpoints: Path) -> dict[int, Path]:
    """All step directories by step, ascending, complete or not. Empty if `checkpoints` does not exist."""
    entries = checkpoints.iterdir() if checkpoints.is_dir() else ()
    found = {int(m[1]): p for p in entries if (m := _STEP.fullmatch(p.name)) and p.is_dir()}
    return dict(sorted(found.items()))


def mark_complete(directory: Path, parts: Sequence[str] = PARTS) -> None:
    """Declare the checkpoint in `directory` (`.../step_N`) complete. Call it when every part is written.

    Raises ValueError if a part is absent or empty, or if the directory is not named `step_N`.
    """
    name = _STEP.fullmatch(directory.name)
    if name is None:
        raise ValueError(f"{directory} is no checkpoint directory: its name must be step_<number>")
    files: dict[str, int] = {}
    for part in parts:
        sizes = _file_sizes(directory, part)
        if not sizes:
            raise ValueError(f"checkpoint {directory} cannot be complete: its part {part!r} is not there")
        files |= sizes
    write_atomic(
        directory / MARKER, json.dumps({"step": int(name[1]), "parts": list(parts), "files": files}, indent=1)
    )


def unmark(directory: Path) -> None:
    """Take the completion marker away, before any part is changed or deleted."""
    (directory / MARKER).unlink(missing_ok=True)


def is_marked(directory: Path) -> bool:
    """Whether a save of `directory` was finished, be it intact or damaged since."""
    return (directory / MARKER).is_file()


def why_incomplete(directory: Path) -> str | None:
    """Why `directory` is not a complete checkpoint, or None if it is.

    Existence and size of every listed file are verified, not their contents.
    """
    try:
        files = dict(json.loads((directory / MARKER).read_text())["files"])
    except FileNotFoundError:
        return f"no file {MARKER}: the save did not finish"
    except (ValueError, KeyError, TypeError):
        return f"damaged file {MARKER}"
    for name, size in files.items():
        file = directory / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes instead of {size}"
    return None


def is_complete(directory: Path) -> bool:
    return why_incomplete(directory) is None


def read_step(directory: Path) -> int:
    """Step of a complete checkpoint, as its marker says."""
    return int(json.loads((directory / MARKER).read_text())["step"])


def _file_sizes(directory: Path, part: str) -> dict[str, int]:
    files = (file for file in (directory / part).rglob("*") if file.is_file())
    return {str(file.relative_to(directory)): file.stat().st_size for file in sorted(files)}
