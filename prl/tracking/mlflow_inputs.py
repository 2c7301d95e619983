"""The data of a supervised run as dataset inputs of its MLflow run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

MAX_HASHED = 1 << 20
"""Bytes read from each end of a file for its digest."""
DIGEST_LENGTH = 16
SOURCE_LENGTH = 4000


def log_inputs(client: MlflowClient, run_id: str, config: Any) -> None:
    """Log what `prl sft` trains and validates on, with a digest that tells whether it is the same again."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for context, data in contexts(config):
        source = json.dumps(dataclasses.asdict(data), sort_keys=True)[:SOURCE_LENGTH]
        dataset = Dataset(data.name, digest_of(data), source_type(data), source)
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", context)]))
    client.log_inputs(run_id, inputs)


def contexts(config: Any) -> Iterator[tuple[str, Any]]:
    """(what it is for, data)."""
    yield "training", config.data
    if config.val.data is not None:
        yield "validation", config.val.data


def source_type(data: Any) -> str:
    """`generated`, `local`, or `hf` for a name of the hub."""
    if not hasattr(data, "path"):
        return "generated"
    return "local" if data.path.startswith("bundled:") or Path(data.path).expanduser().exists() else "hf"


def digest_of(data: Any) -> str:
    """Over the names and contents of local files (both ends of large ones), else over the description."""
    found = hashlib.sha256(json.dumps(dataclasses.asdict(data), sort_keys=True).encode())
    if source_type(data) == "local":
        for file in _files(data.path):
            found.update(file.name.encode())
            for part in _ends(file):
                found.update(part)
    return found.hexdigest()[:DIGEST_LENGTH]


def _files(path: str) -> Iterable[Path]:
    from prl.assets import ROOT

    name = path.removeprefix("bundled:")
    place = ROOT / "data" / name if name != path else Path(path).expanduser()
    return [place] if place.is_file() else sorted(file for file in place.rglob("*") if file.is_file())


def _ends(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield str(size).encode()
    with file.open("rb") as stream:
        yield stream.read(MAX_HASHED)
        stream.seek(max(size - MAX_HASHED, 0))
        yield stream.read()
