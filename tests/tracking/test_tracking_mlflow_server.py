"""A run and its MLflow server: a real one that is killed and comes back, and one that talks nonsense."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tracking_lab import append_episodes, append_line, episode

from prl.tracking.facts import Facts
from prl.tracking.mlflow_run import run_id_file
from prl.tracking.mlflow_store import Store, find_store
from prl.tracking.mlflow_writer import MlflowWriter

SECONDS = 500.0


def wait_until(condition: Callable[[], bool], timeout: float = SECONDS) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.1)


class Server:
    """`mlflow server` on a port of its own, over a sqlite store that is already made."""

    def __init__(self, store: Store, directory: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._store, self._directory = store, directory
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        words = ["server", "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        words += [
            "--backend-store-uri",
            self._store.uri,
            "--artifacts-destination",
            str(self._directory / "files"),
        ]
        with (self._directory / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", *words],
                env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_until(self._answers)

    def kill(self) -> None:
        """SIGKILL to the server and its workers, which live in a session of their own."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._directory / "server.log").read_text()
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture
def server(store: Store, tmp_path: Path) -> Iterator[Server]:
    found = Server(store, tmp_path)
    yield found
    found.kill()


def test_a_server_that_is_killed_and_comes_back_lacks_nothing(
    server: Server, facts: Callable[..., Facts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server.start()
    told, said = facts(), []
    writer = MlflowWriter(told, find_store(server.url, tmp_path), said.append, interval=0.2)
    append_line(told.run, 1, loss=1.0)
    writer.start()
    cursor = told.run.path / "mlflow_cursor.json"
    wait_until(cursor.exists)
    server.kill()
    for step in (2, 3):
        append_line(told.run, step, loss=float(step))
    wait_until(lambda: len(said) == 1)
    assert "the run goes on without it" in said[0]
    append_line(told.run, 4, loss=4.0)
    append_episodes(told.run.traces, episode("a", 4))
    server.start()
    wait_until(lambda: len(said) == 2)
    assert said[1] == "MLflow is back and up to date"
    assert writer.close("FINISHED", SECONDS) and len(said) == 2, said
    client = MlflowClient(server.url)
    run_id = run_id_file(told.run).read_text().strip()
    run = client.get_run(run_id)
    assert [p.value for p in client.get_metric_history(run_id, "loss")] == [1.0, 2.0, 3.0, 4.0]
    assert run.info.status == "FINISHED" and run.data.tags["algo"] == "grpo"
    assert run.info.artifact_uri.startswith("mlflow-artifacts:"), "a server keeps artifacts where it wants"
    assert {f.path for f in client.list_artifacts(run_id, "config/attempt_1")} >= {
        "config/attempt_1/resolved.yaml"
    }
    assert len(client.search_traces(locations=[run.info.experiment_id], run_id=run_id)) == 1


class Nonsense(BaseHTTPRequestHandler):
    """Answers every question with a page that is no answer."""

    status = 200

    def do_GET(self) -> None:
        body = b"<html>Please log in</html>"
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.mark.parametrize("status", [200, 403, 500])
def test_a_server_that_talks_nonsense_costs_one_message(
    status: int, facts: Callable[..., Facts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    handler = type("Handler", (Nonsense,), {"status": status})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as wrong:
        threading.Thread(target=wrong.serve_forever, daemon=True).start()
        told, said = facts(), []
        append_line(told.run, 1, loss=1.0)
        url = f"http://127.0.0.1:{wrong.server_address[1]}"
        writer = MlflowWriter(told, find_store(url, tmp_path), said.append, interval=0.05)
        writer.start()
        wait_until(lambda: len(said) == 1)
        time.sleep(0.5)
        assert len(said) == 1 and "the run goes on without it" in said[0] and len(said[0]) < 400
        assert writer.close("FINISHED", 1.0) is False
        assert "follow when the run is resumed" in said[1] and len(said) == 2
        wrong.shutdown()
