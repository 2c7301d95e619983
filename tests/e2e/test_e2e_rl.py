"""Whole runs from the command line, with every real part: engine, environment, orchestrator, trainer."""

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

SMALL = ["rollout.batch_size=16", "rollout.group_size=8", "log.display=plain"]


def prl(tmp_path: Path, *overrides: str, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """`python -m prl …` in an empty directory, so that nothing can come from or land in the checkout."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PRL_OUTPUT_DIR", None)
    command = [sys.executable, "-m", "prl", *overrides]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


def metrics(run: Path, producer: str) -> list[dict]:
    lines = (run / "metrics" / f"{producer}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def steps_of(rows: list[dict], key: str) -> list[int]:
    return [row["step"] for row in rows if key in row]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps with a checkpoint at its end."""
    tmp_path = tmp_path_factory.mktemp("trained")
    done = prl(tmp_path, "run.name=first", "max_steps=3", "ckpt=end", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


def test_run_directory_holds_what_the_design_promises(trained: Path) -> None:
    run = trained / "outputs" / "first"
    assert (run / "configs" / "attempt_1" / "resolved.yaml").is_file()
    assert {p.name for p in (run / "logs" / "latest").glob("*.log")} >= {"orchestrator.log", "inference.log"}
    assert (run / "checkpoints" / "step_3" / "COMPLETE").is_file()
    assert (run / "traces" / "stream.jsonl").stat().st_size > 0
    assert (run / "STATUS.md").is_file()


def test_the_dashboard_finds_trainer_and_sampler_agree_on_an_on_policy_step(trained: Path) -> None:
    from prl.dashboard.annotations import Annotations
    from prl.dashboard.catalog import find_runs
    from prl.dashboard.episode_index import EpisodeIndex
    from prl.dashboard.overlay import node_tokens

    (run,) = find_runs(trained / "outputs")
    index, notes, gaps = EpisodeIndex(run), Annotations(run), []
    index.refresh(seconds=60)
    for number in range(len(index)):
        trace = index.record(number)["traces"][0]
        credit = notes.credit(trace["id"])
        if credit and credit["step"] == 1:
            told = node_tokens(trace, len(trace["nodes"]) - 1, credit, notes.trainer(trace["id"]), str)
            gaps += [gap for gap in told["gap"] if gap is not None]
    assert len(gaps) > 16 and max(map(abs, gaps)) < 1e-3


def test_nothing_is_written_outside_the_run_and_the_store(trained: Path) -> None:
    assert {p.name for p in trained.iterdir()} == {"outputs"}
    assert {p.name for p in (trained / "outputs").iterdir()} <= {
        "first",
        "mlflow.db",
        "mlflow.lock",
        "mlartifacts",
    }


def test_metrics_carry_the_promised_names_at_every_step(trained: Path) -> None:
    run = trained / "outputs" / "first"
    orchestrator, trainer = metrics(run, "orchestrator"), metrics(run, "trainer")
    for key in ("reward/mean", "is_truncated/mean"):
        assert steps_of(orchestrator, f"train/agg/effective/agent/{key}") == [1, 2, 3], key
    assert steps_of(orchestrator, "time/wait_for_policy") == [1, 2, 3]
    for key in (
        "entropy/all/mean",
        "mismatch_kl/all/mean",
        "optim/grad_norm",
        "optim/lr",
        "time/wait_for_batch",
    ):
        assert steps_of(trainer, key) == [1, 2, 3], key
    assert max(row["off_policy/max"] for row in orchestrator if "off_policy/max" in row) <= 2
    proofs = [row["sync/fingerprint_ok"] for row in orchestrator if "sync/fingerprint_ok" in row]
    assert proofs == [1.0] * 4, "v0 to v3 were all applied and proven"


def test_one_finished_mlflow_run_with_every_step(trained: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{trained}/outputs/mlflow.db")
    experiment = client.get_experiment_by_name("prl")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.tags["algo"] == "grpo" and run.data.tags["loss"] == "ipo"
    history = client.get_metric_history(run.info.run_id, "train/agg/effective/agent/reward/mean")
    assert sorted(point.step for point in history) == [1, 2, 3]
    traces = client.search_traces(locations=[experiment.experiment_id], run_id=run.info.run_id)
    assert sorted(trace.info.tags["step"] for trace in traces) == ["1", "2", "3"]
    plots = {artifact.path for artifact in client.list_artifacts(run.info.run_id, "plots")}
    assert {"plots/reward.svg", "plots/mismatch_kl.svg", "plots/entropy.svg", "plots/waits.svg"} <= plots


def test_the_tools_read_a_finished_run(trained: Path) -> None:
    for tool in ("watch", "status", "doctor"):
        told = prl(trained, tool, "first")
        assert told.returncode in (0, 1) and "first" in told.stdout, told.stderr
        assert "\x1b" not in told.stdout and "3/3" in told.stdout


def test_reusing_the_name_is_refused_and_touches_nothing(trained: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in trained.rglob("*")}
    refused = prl(trained, "run.name=first", "max_steps=3")
    assert refused.returncode == 2 and "first" in refused.stderr
    assert before == {p: p.stat().st_mtime_ns for p in trained.rglob("*")}


def test_the_bundled_model_runs_in_shards_on_two_ranks_with_broadcast_weights(tmp_path: Path) -> None:
    sharded = ["zero=3", "cluster.train_ranks=2", "sync=collective", "sync.fingerprint=full"]
    done = prl(tmp_path, "run.name=three", "max_steps=2", "ckpt=end", "tracking=none", *sharded, *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "outputs" / "three"
    proofs = [r["sync/fingerprint_ok"] for r in metrics(run, "orchestrator") if "sync/fingerprint_ok" in r]
    assert proofs == [1.0] * 3, "v0 to v2 were all applied and proven"
    resumed = prl(
        tmp_path, "run.name=three", "run.resume=latest", "max_steps=3", "zero=1", "tracking=none", *SMALL
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert steps_of(metrics(run, "trainer"), "optim/lr") == [1, 2, 3]


def test_export_loads_bit_exactly_and_resume_continues(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from prl.sync.weight_files import WeightFiles

    run = trained / "outputs" / "first"
    done = prl(trained, "export", f"run={run}", f"out={trained}/outputs/first/exported")
    assert done.returncode == 0, done.stderr
    out = run / "exported"
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    for name, tensor in WeightFiles(run / "broadcasts" / "step_3").tensors():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert AutoTokenizer.from_pretrained(out).chat_template

    resumed = prl(trained, "run.name=first", "run.resume=latest", "max_steps=5", "ckpt=end", *SMALL)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert steps_of(metrics(run, "trainer"), "optim/lr") == [1, 2, 3, 4, 5]
    again = prl(trained, "run.name=first", "run.resume=latest", "max_steps=5", *SMALL)
    assert again.returncode == 0 and "5" in again.stdout


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algo=gpro"], ["gpro", "grpo"]),
        (["optim.lrr=1"], ["lrr", "lr"]),
        (["optim.lr=-1"], ["optim.lr", "-1"]),
        (["rollout.group_size=3", "rollout.batch_size=8"], ["rollout.batch_size", "group_size"]),
    ],
)
def test_bad_input_is_refused_at_once_and_writes_nothing(
    tmp_path: Path, overrides: list[str], words: list[str]
) -> None:
    refused = prl(tmp_path, *overrides, timeout=30)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert all(word in refused.stderr for word in words), refused.stderr
    assert list(tmp_path.iterdir()) == []


def start(tmp_path: Path, *overrides: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "prl", *overrides]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for_step(run: Path, step: int, launcher: subprocess.Popen[str], timeout: float = 180) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        assert launcher.poll() is None, launcher.communicate()[0]
        path = run / "metrics" / "trainer.jsonl"
        if path.exists() and any(f'"step": {step},' in line for line in path.read_text().splitlines()):
            return
        time.sleep(0.2)
    raise TimeoutError(f"step {step} never came")


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize("role", ["inference", "env/reverse_text", "orchestrator", "trainer/0"])
def test_killing_a_child_ends_the_run_and_names_it(tmp_path: Path, role: str) -> None:
    launcher = start(tmp_path, "run.name=victim", "max_steps=500", *SMALL)
    try:
        wait_for_step(tmp_path / "outputs" / "victim", 1, launcher)
        children = family(launcher.pid)
        victim = next(p for p in children if "launchers.role" in p.cmdline() and role in p.cmdline())
        victim.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
        output, _ = launcher.communicate(timeout=30)
        assert time.monotonic() - killed_at < 10
        assert launcher.returncode not in (0, None)
        assert role in output and "SIGKILL" in output
        assert alive(children) == []
    finally:
        if launcher.poll() is None:
            launcher.kill()


def test_interrupt_ends_all_children_and_the_tracked_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    launcher = start(tmp_path, "run.name=stopped", "max_steps=500", *SMALL)
    try:
        wait_for_step(tmp_path / "outputs" / "stopped", 1, launcher)
        children = family(launcher.pid)
        launcher.send_signal(signal.SIGINT)
        launcher.communicate(timeout=30)
        assert launcher.returncode == 130
        assert alive(children) == []
    finally:
        if launcher.poll() is None:
            launcher.kill()
    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (run,) = client.search_runs([client.get_experiment_by_name("prl").experiment_id])
    assert run.info.status == "KILLED"


def test_two_trainer_ranks_and_two_environments(tmp_path: Path) -> None:
    done = prl(
        tmp_path,
        *(
            "env=[reverse_text,arithmetic]",
            "cluster.train_ranks=2",
            "zero=2",
            "max_steps=2",
            "run.name=mixed",
        ),
        *SMALL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics(tmp_path / "outputs" / "mixed", "orchestrator")
    assert any("batch/reverse_text" in row or "batch/arithmetic" in row for row in rows)


def test_a_sweep_gives_each_element_a_child_run(tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    done = prl(
        tmp_path,
        *("--multirun", "algo=grpo", "loss=ipo", "optim.lr=1e-4,3e-4", "max_steps=1", "tracking=mlflow"),
        *SMALL,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (store,) = tmp_path.rglob("mlflow.db")
    client = MlflowClient(f"sqlite:///{store}")
    runs = client.search_runs([client.get_experiment_by_name("prl").experiment_id])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len(children) == 2 and len({run.data.params["optim.lr"] for run in children}) == 2
