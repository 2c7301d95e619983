from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tracking_lab import append_line, make_facts

from prl.tracking.facts import Facts
from prl.tracking.mlflow_store import Store, find_store, quieten_mlflow

PROCESS = Path(__file__).with_name("tracking_process.py")
STATUSES = ("FINISHED", "FAILED", "KILLED", "FINISHED")
SECONDS = 2000
"""Time-outs are far beyond what anything takes: the machine may be busy."""


@dataclass
class FirstUse:
    """What four processes met that used a store which was not there, beside what a crash had left of it."""

    store: Store
    codes: list[int] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    runs: dict[str, str] = field(default_factory=dict)
    """Run directory -> status, as the store has them afterwards."""
    artifacts: str = ""
    files: set[str] = field(default_factory=set)


@pytest.fixture(scope="session")
def first_use(tmp_path_factory: pytest.TempPathFactory) -> FirstUse:
    """A sqlite store without runs, made by four processes at once. It takes seconds; tests share it."""
    quieten_mlflow()
    outputs = tmp_path_factory.mktemp("store") / "outputs"
    outputs.mkdir()
    (outputs / ".mlflow.db.growing").write_bytes(b"half a store")
    found = FirstUse(find_store(None, outputs))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROCESS.parent), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(outputs / f"r{number}"), status],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number, status in enumerate(STATUSES)
    ]
    for process in processes:
        found.told.append(process.communicate(timeout=SECONDS)[0])
        found.codes.append(process.returncode)
    assert found.store.database is not None
    with sqlite3.connect(found.store.database) as database:
        query = "select runs.name, status from runs"
        found.runs = dict(database.execute(query).fetchall())
        found.artifacts = database.execute("select artifact_location from experiments").fetchone()[0]
        found.files = {entry.name for entry in outputs.iterdir() if entry.is_file()}
        for table in ("metrics", "latest_metrics", "params", "tags", "runs", "experiment_tags"):
            database.execute(f"delete from {table}")
        database.execute("delete from experiments where name = 'prl'")
    return found


@pytest.fixture
def store(tmp_path: Path, first_use: FirstUse) -> Store:
    """A store of the test's own, without runs."""
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    assert first_use.store.database is not None
    shutil.copy(first_use.store.database, outputs / "mlflow.db")
    return find_store(None, outputs)


@pytest.fixture
def facts(tmp_path: Path) -> Callable[..., Facts]:
    """What the tracker is told about attempt `attempt` of the run `name`; further fields go to the config."""

    def make(attempt: int = 1, name: str = "r", sweep: Path | None = None, **fields: object) -> Facts:
        return make_facts(tmp_path / "outputs" / name, attempt, sweep, **fields)

    return make


@pytest.fixture
def log_step() -> Callable[..., None]:
    """Appends one line to a stream of a run."""
    return append_line
