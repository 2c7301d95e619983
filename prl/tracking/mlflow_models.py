"""Weights in the tracker: a tag that says where an export is, and a version of a registered model on request.

Weights are named by their place, never copied into the tracker.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.load import load_resolved
from prl.config.serving import MlflowConfig
from prl.run_dir import RunDir
from prl.tracking.mlflow_store import find_store, locked, quieten_mlflow
from prl.tracking.secrets import redact

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

log = logging.getLogger(__name__)

WEIGHTS = "weights"
SHARD_BYTES = 5_000_000_000


def exports(run: RunDir) -> dict[str, Path]:
    """Tag -> directory of every export that the run directory holds: `export`, `export.step_N`."""
    found = {}
    if _is_export(run.path / WEIGHTS):
        found["export"] = run.path / WEIGHTS
    for step_dir in sorted(run.checkpoints.glob("step_*")):
        if _is_export(step_dir / WEIGHTS):
            found[f"export.{step_dir.name}"] = step_dir / WEIGHTS
    return found


def weights_of(run: RunDir) -> Path:
    """Weights of the finished run that `from_pretrained` loads: those it wrote, else its last checkpoint,
    exported now. Raises ValueError if there is neither."""
    if _is_export(run.path / WEIGHTS):
        return run.path / WEIGHTS
    import torch  # only for who asks for a registered model

    from prl.checkpoint.export import export
    from prl.checkpoint.export_source import locate

    source = locate(str(run.path), None)
    out = source.step_dir / WEIGHTS
    if not _is_export(out):
        export(source.step_dir, out, torch.float32, SHARD_BYTES, source.model, source.num_layers)
    return out


def register(client: MlflowClient, name: str, weights: Path, run_id: str) -> int:
    """A new version of the registered model `name`, made if it is not there; the number of the version.

    A version that this run has already registered from the same place is not made again.
    """
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = weights.resolve().as_uri()
    for version in client.search_model_versions(f"name = '{name}'"):
        if version.run_id == run_id and version.source == source:
            return int(version.version)
    made = client.create_model_version(name, source, run_id, await_creation_for=0)
    return int(made.version)


def note_export(run: Path, weights: Path, name: str | None) -> str | None:
    """Tell the MLflow run of the run directory `run` where `weights` are, and register them as `name`.

    Returns what to say: the new version, or why nothing was told; None if there is no MLflow run to tell.
    Raises ValueError if a registration that was asked for cannot be made.
    """
    config, id_file = _tracking_of(run), run / "mlflow_run_id"
    if not isinstance(config, MlflowConfig) or not id_file.exists():
        if name:
            raise ValueError(f"register={name}: {run} has no MLflow run; the weights are in {weights}")
        return None
    store = find_store(config.uri, run.parent)
    quieten_mlflow()
    from mlflow.tracking import MlflowClient

    try:
        with locked(store):
            client, run_id = MlflowClient(store.uri), id_file.read_text().strip()
            tag = "export" if weights.parent == run else f"export.{weights.parent.name}"
            client.set_tag(run_id, tag, str(weights))
            return f"version {register(client, name, weights, run_id)} of {name} in MLflow" if name else None
    except Exception as error:  # the weights are written, whatever the tracker does
        reason = str(redact(" ".join(f"{type(error).__name__}: {error}".split())))[:300]
        if name:
            raise ValueError(f"register={name}: {reason}; the weights are in {weights}") from error
        return f"MLflow was not told of the export: {reason}"


def _tracking_of(run: Path) -> Any:
    """`tracking` of the run's newest attempt; None if there is no config."""
    attempts = {int(path.parent.name[8:]): path for path in run.glob("configs/attempt_*/resolved.yaml")}
    return load_resolved(attempts[max(attempts)])[1].tracking if attempts else None


def _is_export(path: Path) -> bool:
    return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
