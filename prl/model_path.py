"""Where the files of a model are: bundled with prl, in a directory, or left behind by a run."""

from __future__ import annotations

from pathlib import Path

from prl.assets import bundled_model, bundled_models
from prl.checkpoint.marker import step_dirs
from prl.config.training import ModelConfig


def named_model(name: str) -> ModelConfig:
    """The model that one word stands for: a bundled one, else a directory."""
    return ModelConfig(name=name, path=None if name in bundled_models() else name)


def resolve_model_path(model: ModelConfig) -> Path:
    """Directory with config.json, tokenizer and weights of `model`.

    A null `path` means the bundled model `name`. A run directory stands for its exported weights:
    `weights/`, else those of its newest checkpoint that has any. Raises ValueError naming what exists.
    """
    if model.path is None:
        return bundled_model(model.name)
    path = Path(model.path).expanduser().absolute()
    for candidate in (path, path / "weights", *_exported_checkpoints(path)):
        if (candidate / "config.json").is_file():
            return candidate
    entries = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    raise ValueError(
        f"model.path={model.path}: no model there (it holds: {', '.join(entries) or 'nothing'}). Give a "
        "directory with config.json, weights and tokenizer, or a run directory with weights/ "
        "(written by `prl export run=…`)"
    )


def _exported_checkpoints(run: Path) -> list[Path]:
    """`checkpoints/step_N/weights` of a run, newest step first."""
    return [directory / "weights" for directory in reversed(step_dirs(run / "checkpoints").values())]
