from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prl.tracking.mlflow_store import Store, find_store, locked, quieten_mlflow


def test_the_default_store_is_an_absolute_file_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = find_store(None, Path("outputs"))
    assert store == Store(
        f"sqlite:///{tmp_path}/outputs/mlflow.db",
        tmp_path / "outputs/mlartifacts",
        tmp_path / "outputs/mlflow.db",
    )
    assert store.uri.startswith("sqlite:////")
    assert store.ui_command == f"mlflow ui --backend-store-uri sqlite:///{tmp_path}/outputs/mlflow.db"


def test_a_relative_sqlite_uri_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_store("sqlite:///mine.db", Path("outputs")).uri == f"sqlite:///{tmp_path}/mine.db"
    assert find_store("sqlite:////data/a b.db", Path("o")).ui_command.endswith("'sqlite:////data/a b.db'")


def test_a_server_is_taken_as_it_is(tmp_path: Path) -> None:
    store = find_store("http://tracker:5000", tmp_path)
    assert store.database is None and "http://tracker:5000" in store.ui_command
    with locked(store):
        assert list(tmp_path.iterdir()) == [], "no lock for a server"


def test_the_database_is_made_once_whoever_comes_first(first_use: Any) -> None:
    database = first_use.store.database
    assert first_use.errors == [] and len(first_use.inodes) == 4 and len(set(first_use.inodes)) == 1
    left = {entry.name for entry in database.parent.iterdir()}
    assert left == {"mlflow.db", "mlflow.lock"}, "what a crash left half made is gone too"
    place = sqlite3.connect(database).execute("select artifact_location from experiments").fetchone()[0]
    assert str(first_use.store.artifacts) in place, "not ./mlruns of some working directory"


def test_the_lock_excludes_and_gives_up(store: Store) -> None:
    with locked(store):
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="held the MLflow store"), locked(store, timeout=0.2):
            raise AssertionError
        assert time.monotonic() - began < 2
    with locked(store, timeout=0.2):
        pass


def test_telemetry_is_off_and_the_users_settings_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_DISABLE_TELEMETRY", raising=False)
    quieten_mlflow()
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"


def test_importing_the_writer_does_not_import_mlflow() -> None:
    code = "import sys, prl.tracking.mlflow_writer, prl.tracking.display; print('mlflow' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"
