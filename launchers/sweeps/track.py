"""The sweep's parent run in MLflow: report, plots, and what the elements reached."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from launchers.sweeps.book import Book
from launchers.sweeps.report import CURVES, PARALLEL, REPORT
from prl.config.load import load_resolved
from prl.run_dir import RunDir
from prl.tracking.mlflow_store import Store, find_store, locked, quieten_mlflow
from prl.tracking.mlflow_sweep import PARENT_FILE


def publish(book: Book) -> bool:
    """Put the report on the parent run; False where the sweep is not tracked, or MLflow cannot be reached.

    MLflow is imported only when an element made a parent run. Its faults are told and end nothing.
    """
    parent, config = book.path / PARENT_FILE, _config_of(book)
    if not parent.exists() or config is None:
        return False
    try:
        _publish(book, find_store(config.tracking.uri, book.path), parent.read_text().strip())
    except Exception as error:  # whatever the tracker does, the report lies in the sweep's directory
        print(f"MLflow did not take the report: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        return False
    return True


def _publish(book: Book, store: Store, run_id: str) -> None:
    quieten_mlflow()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store.uri)
    records = book.records()
    with locked(store):
        for name in (REPORT, CURVES, PARALLEL):
            if (book.path / name).exists():
                client.log_artifact(run_id, str(book.path / name))
        for record in records.values():
            if record.objective is not None:
                client.log_metric(run_id, "objective", record.objective, step=record.number)
        reached = [record for record in records.values() if record.finished and record.objective is not None]
        if reached:
            best = max(reached, key=lambda record: record.objective or float("-inf"))
            client.set_tag(run_id, "best", f"{best.number}: {' '.join(best.overrides)}")
            client.log_metric(run_id, "best_objective", best.objective or 0.0)


def _config_of(book: Book) -> Any | None:
    """Config of the first element that began and is tracked by MLflow."""
    for number in sorted(book.elements()):
        resolved = _newest(book.run(number))
        if resolved is not None:
            _, config = load_resolved(resolved)
            return config if config.tracking.name == "mlflow" else None
    return None


def _newest(run: Path) -> Path | None:
    path = run / "configs" / "latest" / RunDir(run).resolved_config.name
    return path if path.exists() else None
