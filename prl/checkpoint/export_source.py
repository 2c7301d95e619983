"""What `run=` and `step=` of `prl export` mean: a complete checkpoint, and the model it was trained from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.checkpoint.marker import step_dir, why_incomplete
from prl.checkpoint.resolve import at_step, checkpoints_dir, latest
from prl.config.load import load_resolved
from prl.model_path import resolve_model_path
from prl.run_dir import RunDir


@dataclass(frozen=True)
class ExportSource:
    """A checkpoint and where config and tokenizer of its model are.

    `num_layers`: how many layers the run kept of that model; None = all.
    """

    step_dir: Path
    model: Path
    num_layers: int | None = None


def output_directory(out: str | None, source: ExportSource) -> Path:
    """Where the weights of a checkpoint go: `out`, else `weights/` beside them."""
    return Path(out).expanduser().absolute() if out else source.step_dir / "weights"


def locate(run: str, step: int | None) -> ExportSource:
    """Find checkpoint `step` (None: the newest) of `run`: a run directory, or a checkpoint directory of it.

    Raises ValueError if it does not exist or is not complete, or if the run's config is not found.
    """
    path = Path(run).expanduser().absolute()
    path = path.parent if path.name == "trainer" else path
    if not path.is_dir():
        raise ValueError(f"run={run}: there is no directory {path}")
    if (path / "configs").is_dir():
        config = _newest_config(path)
        checkpoints = checkpoints_dir(config.ckpt, RunDir(path))
        return _source(latest(checkpoints) if step is None else at_step(checkpoints, step), config)
    if step is not None and path.name != step_dir(path.parent, step).name:
        raise ValueError(f"run={run} is not the checkpoint of step={step}: give the run directory instead")
    if reason := why_incomplete(path):
        raise ValueError(f"run={run} is neither a run directory nor a complete checkpoint ({reason})")
    return _source(path, _newest_config(path.parent.parent))


def _source(directory: Path, config: Any) -> ExportSource:
    return ExportSource(directory, resolve_model_path(config.model), config.model.num_layers)


def _newest_config(run: Path) -> Any:
    """The typed config of the run's newest attempt."""
    files = {
        int(f.parent.name.removeprefix("attempt_")): f for f in run.glob("configs/attempt_*/resolved.yaml")
    }
    if not files:
        raise ValueError(
            f"{run} has no configs/attempt_n/resolved.yaml, which tells the model's config and tokenizer: "
            "give run=<run directory> step=<n>"
        )
    return load_resolved(files[max(files)])[1]
