"""Where the files of a model are: bundled with prl, in a directory, or left behind by a run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from prl.assets import bundled_model, bundled_models
from prl.checkpoint.marker import is_complete, read_step, step_dirs
from prl.config.training import ModelConfig

EXPORTED_STEP = "prl_export.json"
"""Beside exported weights of a run: the step they are of."""


def named_model(name: str) -> ModelConfig:
    """The model that one word stands for: a bundled one, else a directory."""
    return ModelConfig(name=name, path=None if name in bundled_models() else name)


def resolve_model_path(model: ModelConfig) -> Path:
    """Directory with config.json, tokenizer and weights of `model`.

    A null `path` means the bundled model `name`. A run directory stands for its newest exported weights:
    `weights/` or those of a checkpoint. Raises ValueError naming what exists.
    """
    if model.path is None:
        return bundled_model(model.name)
    path = Path(model.path).expanduser().absolute()
    exported = _exported(path)
    if (path / "config.json").is_file():
        return path
    if exported:
        return max(exported, key=lambda directory: exported[directory])
    entries = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    raise ValueError(
        f"model.path={model.path}: no model there (it holds: {', '.join(entries) or 'nothing'}). Give a "
        "directory with config.json, weights and tokenizer, or a run directory with weights/ "
        "(written by `prl export run=…`)"
    )


def newer_checkpoint(model: ModelConfig) -> Path | None:
    """The complete checkpoint that `model.path` stands for, if it is newer than all exported weights.

    `model.path`: a run directory, or a checkpoint of one. None when it is anything else.
    """
    path = None if model.path is None else Path(model.path).expanduser().absolute()
    if path is None or not path.is_dir() or (path / "config.json").is_file():
        return None
    complete = [place for place in (path, *step_dirs(path / "checkpoints").values()) if is_complete(place)]
    newest = max(complete, key=read_step, default=None)
    if newest is None or read_step(newest) <= max(_exported(path).values(), default=-1):
        return None
    return newest


def _exported(run: Path) -> dict[Path, float]:
    """Exported weights of a run (or of one checkpoint) by the step they are of."""
    places = {run / "weights": _step_of(run / "weights")}
    for step, directory in step_dirs(run / "checkpoints").items():
        places[directory / "weights"] = step
    return {place: step for place, step in places.items() if (place / "config.json").is_file()}


def _step_of(weights: Path) -> float:
    """Weights that do not tell their step were put there by hand: they count as the newest."""
    file = weights / EXPORTED_STEP
    return int(json.loads(file.read_text())["step"]) if file.is_file() else math.inf


def read_model_config(directory: Path) -> dict[str, Any]:
    """A model's `config.json`, with what it says of its text part on top. Raises OSError if there is none."""
    told = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return {**told, **told.get("text_config", {})}
