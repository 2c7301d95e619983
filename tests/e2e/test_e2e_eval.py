"""`prl eval` from the command line, with every real part: engine, environment server, ledger, MLflow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

SHORT = ["--sampling.max_tokens", "13", "log.display=plain"]


def environment() -> dict[str, str]:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found.pop("PRL_OUTPUT_DIR", None)
    return found


def prl(place: Path, *words: str, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prl", *words]
    return subprocess.run(
        command, cwd=place, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def rollouts(run: Path) -> list[tuple[int, str, int]]:
    lines = (run / "traces" / "stream.jsonl").read_text().splitlines()
    return [(r["step"], r["task_key"], r["rollout"]) for r in map(json.loads, lines)]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished evaluation of the bundled model on the engine that prl starts for it."""
    place = tmp_path_factory.mktemp("measured")
    done = prl(place, "eval", "reverse_text", "-n", "6", "-r", "2", "run.name=first", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Evaluated reverse_text: agent avg@2" in done.stdout and "12 rollouts, 0 errors" in done.stdout
    return place


def test_results_are_in_the_run_directory(measured: Path) -> None:
    run = measured / "outputs" / "first"
    tree = json.loads((run / "results.json").read_text())
    assert tree["complete"] and tree["scores"][0]["agents"]["agent"]["avg"]["tasks"] == 6
    assert "| reverse_text | agent | 6 | 12 | 0 |" in (run / "results.md").read_text()
    assert (run / "rewards.svg").read_text().startswith("<svg")
    assert len(rollouts(run)) == len(set(rollouts(run))) == 12
    assert {p.name for p in measured.iterdir()} == {"outputs"}


def test_mlflow_has_the_table_the_plot_and_traces(measured: Path) -> None:
    import mlflow
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{measured}/outputs/mlflow.db"
    mlflow.set_tracking_uri(uri)
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("prl").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED" and "eval/reverse_text/effective/agent/avg_at_2" in run.data.metrics
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"results.md", "results.json", "results_table.json", "rewards.svg"}
    traces = client.search_traces(locations=[experiment], run_id=run.info.run_id)
    assert len(traces) == 12
    reply = next(span for span in traces[0].data.spans if span.name == "reply")
    assert reply.inputs["messages"][0]["content"].startswith("reverse ")


def test_resume_adds_rollouts_and_refuses_another_measurement(measured: Path) -> None:
    run = measured / "outputs" / "first"
    before = rollouts(run)
    words = ["eval", "reverse_text", "run.name=first", "--resume", "tracking=none", *SHORT]
    refused = prl(measured, *words, "-n", "6", "-r", "2", "--sampling.temperature", "0.5")
    assert refused.returncode == 2 and "env.reverse_text.sampling.temperature: null -> 0.5" in refused.stderr
    assert rollouts(run) == before
    more = prl(measured, *words, "-n", "7", "-r", "3")
    assert more.returncode == 0, more.stdout + more.stderr
    assert rollouts(run)[:12] == before and len(set(rollouts(run))) == len(rollouts(run)) == 21


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path) -> None:
    words = [
        "eval",
        "reverse_text",
        "-n",
        "5000",
        "-r",
        "2",
        "-c",
        "8",
        "run.name=r",
        "tracking=none",
        *SHORT,
    ]
    command = [sys.executable, "-m", "prl", *words]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True)
    stream = tmp_path / "outputs" / "r" / "traces" / "stream.jsonl"
    deadline = time.monotonic() + 240
    while not (stream.exists() and stream.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "finished rollouts are kept" in output
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    tree = json.loads((tmp_path / "outputs" / "r" / "results.json").read_text())
    assert (
        not tree["complete"] and tree["scores"][0]["finished"] == len(set(rollouts(stream.parents[1]))) >= 20
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["eval", "nosuch", "-n", "3"], "looked for the module 'nosuch'"),
        (["eval", "reverse_text", "-m", "nosuch"], "no bundled model 'nosuch'"),
        (["eval", "compare", "a", "b"], "a is not there"),
    ],
)
def test_refusals_start_nothing(tmp_path: Path, words: list[str], expected: str) -> None:
    refused = prl(tmp_path, *words)
    assert refused.returncode == 2 and expected in refused.stderr and "Traceback" not in refused.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_endpoint_that_is_down_is_one_line(tmp_path: Path) -> None:
    words = [
        "eval",
        "reverse_text",
        "-n",
        "3",
        "-m",
        "x",
        "--client.base_url",
        "http://127.0.0.1:9/v1",
        "tracking=none",
    ]
    failed = prl(tmp_path, *words)
    assert failed.returncode == 1
    (line,) = failed.stderr.strip().splitlines()
    assert line.startswith("the evaluation failed: client.base_url = http://127.0.0.1:9/v1: no answer")


def test_checkpoints_are_measured_with_the_weights_that_were_trained(tmp_path: Path) -> None:
    """The engine's fingerprint of each step equals what the trainer published after that step."""
    small = ["rollout.batch_size=16", "rollout.group_size=8", "tracking=none", "log.display=none"]
    trained = prl(tmp_path, *small, "max_steps=2", "ckpt=interval", "ckpt.interval=1", "run.name=trained")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    words = ["eval", "reverse_text", "-n", "2", "-m", "outputs/trained", "steps=[1,final]", "run.name=curve"]
    done = prl(tmp_path, *words, "tracking=none", *SHORT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Evaluated reverse_text at step 1:" in done.stdout and "at step 2:" in done.stdout
    configs = tmp_path / "outputs" / "curve" / "configs" / "attempt_1"
    for step in (1, 2):
        published = tmp_path / "outputs" / "trained" / "broadcasts" / f"step_{step}" / "COMPLETE.json"
        served = (configs / f"weights_step_{step}.txt").read_text().strip()
        assert served == json.loads(published.read_text())["fingerprint"]
