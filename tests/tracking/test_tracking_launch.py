"""The status of a run in the tracker is true however its launcher ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from prl.checkpoint.marker import mark_complete
from prl.tracking.mlflow_store import Store

SECONDS = 500.0
SCRIPT = Path(__file__).with_name("launch_tracked.py")
ENDLESS = [["orchestrator", "job", "steps", "RUN"]]
SHORT = [["orchestrator", "job", "work", "0.2"]]


def wait_until(condition: Callable[[], bool], timeout: float = SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)


@pytest.fixture
def launch(store: Store) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    assert store.database is not None
    outputs, started = store.database.parent, []

    def start(roles: list[list[str]], resume: str = "") -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), str(outputs), json.dumps(roles), resume]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait()


def test_sigterm_sigkill_and_resume_are_one_run_with_a_true_status(
    store: Store, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    from mlflow.tracking import MlflowClient

    assert store.database is not None
    client, run = MlflowClient(store.uri), store.database.parent / "r"

    def run_id() -> str:
        return (run / "mlflow_run_id").read_text().strip()

    def stored() -> Any:
        return client.get_run(run_id())

    first = launch(ENDLESS)
    wait_until((run / "mlflow_cursor.json").exists)
    assert stored().info.status == "RUNNING"
    first.send_signal(signal.SIGTERM)
    assert first.wait(SECONDS) == 128 + signal.SIGTERM
    assert stored().info.status == "KILLED"
    mine = run_id()

    for part in ("trainer", "orchestrator"):
        (run / "checkpoints" / "step_1" / part).mkdir(parents=True)
        (run / "checkpoints" / "step_1" / part / "state").write_text("x")
    mark_complete(run / "checkpoints" / "step_1")
    second = launch(ENDLESS, "latest")
    wait_until(lambda: stored().data.tags.get("attempt") == "2")
    family = psutil.Process(second.pid).children(recursive=True)
    second.kill()
    second.wait()
    wait_until(lambda: not any(process.is_running() for process in family))
    assert stored().info.status == "RUNNING", "nobody was left to say otherwise"

    third = launch(SHORT, "latest")
    told = third.communicate(timeout=SECONDS)[0]
    assert third.returncode == 0, told
    assert run_id() == mine and stored().info.status == "FINISHED"
    tags = stored().data.tags
    assert tags["attempt"] == "3" and "step 1" in tags["resumed.attempt_3"]
    (experiment,) = [e for e in client.search_experiments() if e.name == "prl"]
    assert len(client.search_runs([experiment.experiment_id])) == 1
