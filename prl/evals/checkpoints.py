"""Several checkpoints of a training run in one evaluation: which ones, and how the engine gets them."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prl.checkpoint.export_source import locate
from prl.checkpoint.marker import read_step
from prl.config.rules_eval import FINAL
from prl.config.schema import EvalConfig

log = logging.getLogger(__name__)

SHARD_BYTES = 5_000_000_000


def settle_checkpoints(config: EvalConfig) -> None:
    """Replace names by facts, in place: `steps` by numbers, `model` by the model that the run began with.

    Raises ValueError if a checkpoint does not exist or is not complete.
    """
    if not config.steps:
        return
    run = config.checkpoints or config.model.path
    assert run is not None, "the rules of the config see to it"
    found = [locate(run, None if step == FINAL else step) for step in config.steps]
    config.steps = sorted({read_step(source.step_dir) for source in found})
    config.checkpoints = str(Path(run).expanduser().absolute())
    config.model.path, config.model.num_layers = str(found[0].model), found[0].num_layers


@contextmanager
def exported(config: EvalConfig, step: int, parent: Path) -> Iterator[Path]:
    """A temporary directory with the weights of checkpoint `step`, float32, that an engine can load."""
    import torch

    from prl.checkpoint.export import export

    assert config.checkpoints is not None
    source = locate(config.checkpoints, step)
    out = parent / f"step_{step}"
    shutil.rmtree(out, ignore_errors=True)
    try:
        log.info(
            "%s", export(source.step_dir, out, torch.float32, SHARD_BYTES, source.model, source.num_layers)
        )
        yield out
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def weight_files(config: EvalConfig) -> dict[str, list[int]]:
    """Size and time of change of every file that decides what is measured, by path; empty for an endpoint.

    Attempts at one evaluation must agree on it: weights that changed under the same name are another model.
    """
    from prl.model_path import resolve_model_path

    if config.inference.name == "external":
        return {}
    if config.steps:
        assert config.checkpoints is not None
        directories = {f"step_{step}": locate(config.checkpoints, step).step_dir for step in config.steps}
        return {name: _stamp(path / "COMPLETE") for name, path in directories.items()}
    model: Any = config.model
    directory = resolve_model_path(model)
    files = sorted([*directory.glob("*.safetensors"), *directory.glob("*.json"), *directory.glob("*.jinja")])
    return {path.name: _stamp(path) for path in files}


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]
