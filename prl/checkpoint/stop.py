"""Stopping a run at a step boundary: the launcher asks, a checkpoint is made, the trainer tells which.

The request is seen by the orchestrator, which then writes its part with the next batch, and by the trainer,
which completes the checkpoint of that step and ends. Only rank 0 looks; the ranks agree on what it saw.
"""

from __future__ import annotations

import json
from pathlib import Path

from prl.run_dir import RunDir, write_atomic


def request(run: RunDir) -> None:
    """Ask the processes of this attempt to make a checkpoint as soon as they can."""
    write_atomic(_request(run), "")


def is_requested(run: RunDir) -> bool:
    return _request(run).exists()


def tell_stopped(run: RunDir, step: int) -> None:
    """The checkpoint of `step` is complete and nothing is trained after it."""
    write_atomic(_answer(run), json.dumps({"step": step}))


def stopped_at(run: RunDir) -> int | None:
    """Step of the checkpoint that was made on request; None while there is none."""
    try:
        return int(json.loads(_answer(run).read_text())["step"])
    except FileNotFoundError:
        return None


def _request(run: RunDir) -> Path:
    return run.configs / "stop_requested"


def _answer(run: RunDir) -> Path:
    return run.configs / "stopped_at.json"
