"""The endpoint of a process: what Prometheus and a health check see."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from monitor_lab import append, write_run

from prl.config.serving import MlflowConfig, MonitorConfig
from prl.monitor.companions import companions, serve_metrics
from prl.monitor.endpoint import Endpoint, open_endpoint
from prl.monitor.exposition import TAIL_BYTES, Sample, exposition, newest, render
from prl.monitor.heartbeat import Heartbeat
from prl.run_dir import RunDir

LINE = re.compile(r"([a-z_0-9]+)(\{[^}]*\})? (\S+)")


def parsed(text: str) -> dict[str, float]:
    """The text format, read by rules of its own: every sample below the type of its name."""
    found, typed = {}, set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            name, kind = line.split()[2:]
            assert kind in ("gauge", "counter") and name not in typed, "one type a name"
            typed.add(name)
            continue
        match = LINE.fullmatch(line)
        assert match and match[1] in typed, line
        found[match[1] + (match[2] or "")] = float(match[3])
    return found


def get(url: str) -> tuple[int, str, str]:
    """Status, content type, text."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(write_run(tmp_path, 12))


def test_gauges_of_the_trainer(run: RunDir) -> None:
    found = parsed(exposition(run, "trainer/0"))
    expected = {"trainer_step": 12, "trainer_loss": 0.01, "trainer_grad_norm": 0.5, "trainer_entropy": 0.4}
    expected |= {"trainer_mismatch_kl": 1e-4, "trainer_learning_rate": 1e-4}
    expected |= {"trainer_throughput_tokens_per_sec": 1000, "trainer_wait_for_batch_seconds": 0.3}
    assert expected.items() <= found.items() and found['prl_up{role="trainer/0"}'] == 1
    assert abs(found["trainer_last_step_timestamp_seconds"] - time.time()) < 3600
    assert found['process_resident_memory_bytes{role="trainer/0"}'] > 1e6
    assert "trainer_mfu_percent" not in found, "what was not told is absent, not 0"


def test_gauges_of_the_orchestrator_by_agent(run: RunDir) -> None:
    append(run.path, "orchestrator", {"step": None, "time": 1.0, "dispatcher/inflight/train": 7})
    found = parsed(exposition(run, "orchestrator"))
    assert found["orchestrator_step"] == 12 and found["orchestrator_inflight"] == 7
    assert found['orchestrator_reward{agent="agent"}'] == 0.5


def test_other_processes_have_their_process_only(run: RunDir) -> None:
    names = {name.partition("{")[0] for name in parsed(exposition(run, "env/reverse_text"))}
    assert names == {
        "prl_up",
        "process_resident_memory_bytes",
        "process_cpu_seconds_total",
        "process_start_time_seconds",
    }


def test_a_scrape_reads_the_end_of_a_long_stream_only(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    line = json.dumps({"producer": "trainer", "step": 1, "time": 1.0, "old": 1.0})
    path.write_text((line + "\n") * (2 * TAIL_BYTES // len(line)))
    with path.open("a") as file:
        file.write(json.dumps({"producer": "trainer", "step": 9, "time": 2.0, "new": 2.0}) + "\n{torn")
    told = newest(path)
    assert told.step == 9 and told.step_time == told.heard == 2.0 and told.values == {"old": 1.0, "new": 2.0}
    assert newest(tmp_path / "none.jsonl").values == {}


def test_labels_are_escaped() -> None:
    text = render([Sample("a", 1.5, {"role": 'env/"x"\\\n'})])
    assert text == '# TYPE a gauge\na{role="env/\\"x\\"\\\\\\n"} 1.5\n'


def test_the_endpoint_is_found_and_answers(run: RunDir) -> None:
    endpoint = open_endpoint(MonitorConfig(endpoints=True), run, "trainer/0")
    assert endpoint is not None
    told = json.loads(run.address_file("metrics/trainer/0").read_text())
    assert told["address"] == endpoint.address and told["address"].startswith("http://127.0.0.1:")
    status, kind, text = get(f"{endpoint.address}/metrics")
    assert (
        status == 200 and kind.startswith("text/plain; version=0.0.4") and parsed(text)["trainer_step"] == 12
    )
    for path in ("/healthz", "/health"):
        status, kind, text = get(endpoint.address + path)
        health = json.loads(text)
        assert status == 200 and kind == "application/json" and health["status"] == "ok"
        assert health["step"] == 12 and health["pid"] == os.getpid() and health["heard_seconds_ago"] < 3600
    assert get(f"{endpoint.address}/../etc/passwd")[0] == 404
    endpoint.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{endpoint.address}/healthz", timeout=5)


def test_each_process_has_a_port_of_its_own(run: RunDir) -> None:
    first, second = Endpoint("127.0.0.1", run, "orchestrator"), Endpoint("127.0.0.1", run, "inference")
    assert first.address != second.address
    first._server.server_close()
    second._server.server_close()


def test_a_host_that_is_not_here_ends_no_run(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    assert open_endpoint(MonitorConfig(endpoints=True, host="192.0.2.1"), run, "trainer/0") is None
    assert "monitor.host = 192.0.2.1" in caplog.text


def test_no_endpoint_where_none_is_wanted(run: RunDir) -> None:
    assert serve_metrics(SimpleNamespace(monitor=MonitorConfig()), run, "trainer/0") is None
    assert serve_metrics(SimpleNamespace(), run, "export") is None, "a job without the setting"
    assert not run.address_file("metrics/trainer/0").exists()


class Watchdog:
    """Counts the beats that arrive; answers with `status`."""

    def __init__(self) -> None:
        self.beats = 0
        self.status = 200
        watchdog = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                watchdog.beats += 1
                self.send_response(watchdog.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/beat"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def wait_for(self, beats: int) -> None:
        deadline = time.monotonic() + 120
        while self.beats < beats:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def watchdog() -> Iterator[Watchdog]:
    found = Watchdog()
    yield found
    found.close()


def test_a_heart_beats_with_progress_only(run: RunDir, watchdog: Watchdog) -> None:
    beat = Heartbeat(watchdog.url, run.path, 0.02)
    beat.start()
    time.sleep(0.3)
    append(run.path, "system", {"step": None, "time": 1.0, "system/cpu": 1.0})
    time.sleep(0.3)
    assert watchdog.beats == 0, "that the machine is looked at is no progress of the run"
    append(run.path, "trainer", {"step": 13, "time": 1.0, "optim/lr": 1.0})
    watchdog.wait_for(1)
    time.sleep(0.2)
    assert watchdog.beats == 1
    beat.close(60)


def test_a_beat_that_failed_is_sent_again_and_told_once(
    run: RunDir, watchdog: Watchdog, caplog: pytest.LogCaptureFixture
) -> None:
    watchdog.status = 500
    beat = Heartbeat(watchdog.url, run.path, 0.02)
    beat.start()
    append(run.path, "trainer", {"step": 13, "time": 1.0, "optim/lr": 1.0})
    watchdog.wait_for(3)
    assert caplog.text.count("the heartbeat did not arrive") == 1
    watchdog.status = 200
    seen = watchdog.beats
    watchdog.wait_for(seen + 1)
    beat.close(60)


def test_companions_start_what_is_asked_for_and_stop_it(run: RunDir, watchdog: Watchdog) -> None:
    monitor = MonitorConfig(endpoints=True, heartbeat_url=watchdog.url, heartbeat_seconds=0.02)
    config = SimpleNamespace(tracking=MlflowConfig(system_seconds=0.02), monitor=monitor)
    names = {"system-metrics", "heartbeat", "metrics-endpoint"}

    def alive() -> set[str]:
        return {thread.name for thread in threading.enumerate()} & names

    with companions(config, run):
        assert alive() == names
        assert run.address_file("metrics/launcher").exists()
        append(run.path, "trainer", {"step": 13, "time": 1.0, "optim/lr": 1.0})
        watchdog.wait_for(1)
    deadline = time.monotonic() + 120
    while alive() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive() == set()
    quiet = SimpleNamespace(tracking=MlflowConfig(system_seconds=0.0), monitor=MonitorConfig())
    with companions(quiet, run):
        assert alive() == set()
