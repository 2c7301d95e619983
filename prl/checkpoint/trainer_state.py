"""`trainer_state.json` and `rng/rank_R.json`: everything of a trainer that is not a large tensor."""

from __future__ import annotations

import base64
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prl.run_dir import write_atomic

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
FORMAT = 1

_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write `state` as `trainer_state.json` in `path`. Raises TypeError if it is not JSON."""
    write_atomic(path / STATE_FILE, json.dumps({"format": FORMAT, **state}, indent=1))


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote. Raises ValueError if it is not there or of another format."""
    file = path / STATE_FILE
    if not file.is_file():
        raise ValueError(f"{path} is no trainer checkpoint: it has no file {STATE_FILE}")
    state = json.loads(file.read_text())
    if state.get("format") != FORMAT:
        raise ValueError(f"{file} has format {state.get('format')}, this version of prl reads {FORMAT}")
    return state


def saved_adapter(path: Path) -> dict[str, Any] | None:
    """PEFT's config of the adapters in checkpoint `path`; None for whole weights or without a state file."""
    return read_state(path).get("adapter") if (path / STATE_FILE).is_file() else None


def counters(engine: Any) -> dict[str, int]:
    """DeepSpeed's step counters."""
    return {name: int(getattr(engine, name)) for name in _COUNTERS}


def restore_counters(engine: Any, saved: dict[str, int]) -> None:
    for name, value in saved.items():
        setattr(engine, name, value)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Class and hyper-parameters of each parameter group."""
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "groups": groups}


def check_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Log the hyper-parameters that changed since `saved`: those of the run's config hold.

    Raises ValueError if the saved state is of another optimizer or of other parameter groups.
    """
    now = json.loads(json.dumps(describe_optimizer(optimizer)))
    if now["class"] != saved["class"] or len(now["groups"]) != len(saved["groups"]):
        raise ValueError(
            f"the checkpoint is of optimizer {_title(saved)}, the run's is {_title(now)}: "
            "resume with ckpt.skip_optimizer=true for a fresh one"
        )
    for index, (new, old) in enumerate(zip(now["groups"], saved["groups"], strict=True)):
        for key in sorted(new.keys() & old.keys() - {"lr"}):
            if new[key] != old[key]:
                logger.info("optimizer group %d: %s was %s, is now %s", index, key, old[key], new[key])


def _title(optimizer: dict[str, Any]) -> str:
    return f"{optimizer['class']} with {len(optimizer['groups'])} parameter groups"


def random_state() -> dict[str, Any]:
    """The random number generators of this process (Python, NumPy, torch CPU and device) as JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": [version, list(internal), gauss],
        "numpy": [name, keys.tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
        "cuda": _text(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
    }


def write_rng(path: Path, rank: int, state: dict[str, Any]) -> None:
    """Write a `random_state` of this rank to `path/rng`."""
    write_atomic(_rng_file(path, rank), json.dumps(state))


def restore_rng(path: Path, rank: int) -> None:
    """Set the generators as `write_rng` found them. A rank that was not there keeps its own."""
    file = _rng_file(path, rank)
    if not file.is_file():
        logger.info("rank %d is not in the checkpoint: it keeps its own random state", rank)
        return
    state = json.loads(file.read_text())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(state["numpy"]))
    torch.set_rng_state(_bytes(state["torch"]))
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes(state["cuda"]))


def _rng_file(path: Path, rank: int) -> Path:
    return path / "rng" / f"rank_{rank}.json"


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
