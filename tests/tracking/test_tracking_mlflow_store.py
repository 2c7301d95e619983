from __future__ import annotations

import os
import subprocess
import sys
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


def test_four_processes_start_on_one_fresh_store(first_use: Any) -> None:
    assert first_use.codes == [0, 0, 0, 0], first_use.told
    assert first_use.runs == {"r0": "FINISHED", "r1": "FAILED", "r2": "KILLED", "r3": "FINISHED"}
    assert first_use.files == {"mlflow.db", "mlflow.lock"}, "what a crash left half made is gone too"
    assert str(first_use.store.artifacts) in first_use.artifacts, "not ./mlruns of some working directory"


def test_the_lock_excludes_and_gives_up(store: Store) -> None:
    with (
        locked(store),
        pytest.raises(TimeoutError, match="held the MLflow store"),
        locked(store, timeout=0.2),
    ):
        raise AssertionError
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
