"""Whole runs as jobs of a real SLURM: one node, three nodes with roles, and what ends them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_runs import steps

from prl.run_dir import BIND_VAR

pytestmark = pytest.mark.slurm

SMALL = ["rollout.batch_size=8", "rollout.group_size=4", "log.display=plain", "tracking=none"]
THREE = ["cluster.infer_nodes=1", "cluster.train_nodes=2", "cluster.train_ranks=2", "cluster.gpus_per_node=2"]


def environment_of(process: Any) -> dict[str, str]:
    return {key: value for key, value in process.environ().items() if not key.startswith("LS_")}


def test_a_run_on_one_node_is_waited_for_and_is_what_the_dry_run_said(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    words = [*SMALL, "max_steps=1", "cluster=slurm", "cluster.gpus_per_node=2", "run.name=one"]
    more = ["cluster.wait=true", "cluster.poll_seconds=0.5", "cluster.setup=['echo SETUP RAN']"]
    dry = cluster.prl(*words, *more, "dry_run=true")
    assert dry.returncode == 0 and not (cluster.place / "outputs").exists()
    told = cluster.prl(*words, *more)
    job, run = submitted(told), cluster.place / "outputs" / "one"
    assert cluster.state(job) == "COMPLETED" and f"job {job}: COMPLETED" in told.stdout
    assert "finished at step 1" in told.stdout, "the log is shown while it is waited for"
    assert steps(run) == [1] and "SETUP RAN" in told.stdout
    (script,) = (run / "slurm" / job).glob("*_submission.sh")
    shown = dry.stdout.split("--- sbatch script\n")[1].split("\ndry run:")[0]
    assert script.read_text().rstrip() == shown
    again = cluster.prl(*words)
    assert again.returncode == 2 and "exists" in again.stderr


def test_three_nodes_have_their_roles_and_a_dead_one_ends_all(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    words = [*SMALL, "sync=collective", "max_steps=100000", "cluster=slurm", *THREE, "run.name=three"]
    job, run = submitted(cluster.prl(*words)), cluster.place / "outputs" / "three"
    cluster.wait(lambda: len(steps(run)) >= 2 or not cluster.queue(job))
    assert cluster.queue(job) == "RUNNING", logs(run)
    roles = {process.cmdline()[3]: process for process in cluster.processes(str(run / "configs"))}
    assert set(roles) == {"inference", "env/reverse_text", "orchestrator", "trainer/0", "trainer/1"}
    hosts = {name: environment_of(process)["SLURMD_NODENAME"] for name, process in roles.items()}
    assert hosts == {
        "inference": "n1",
        "env/reverse_text": "n2",
        "orchestrator": "n2",
        "trainer/0": "n2",
        "trainer/1": "n3",
    }
    ranks = [environment_of(roles[f"trainer/{rank}"]) for rank in (0, 1)]
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for env in ranks] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
    ]
    assert {env["MASTER_ADDR"] for env in ranks} == {"n2"} and len({env["MASTER_PORT"] for env in ranks}) == 1
    assert all(env["CUDA_VISIBLE_DEVICES"] in ("0", "1") for env in ranks)
    offers = [json.loads(file.read_text()) for file in run.glob("broadcasts/*/collective.json")]
    assert {offer["host"] for offer in offers} == {ranks[0][BIND_VAR]}, "other nodes must reach it"
    everybody = cluster.processes(str(run))
    roles["trainer/1"].send_signal(signal.SIGKILL)
    assert cluster.ended(job) == "FAILED"
    cluster.wait(lambda: not [p for p in everybody if p.is_running() and p.status() != "zombie"], 60)
    assert cluster.processes(str(run)) == []
    assert "the run failed: trainer/1 was killed by SIGKILL" in logs(run)
    assert "ended: FAILED" in (run / "STATUS.md").read_text()


def logs(run: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(run.glob("slurm/*/*_log.out")))


def test_a_warned_run_goes_on_in_the_same_place_and_a_cancelled_one_leaves_nobody(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    words = [*SMALL, "tracking=mlflow", "max_steps=100000", "cluster=slurm", "cluster.time=5", "run.name=r"]
    job, run = submitted(cluster.prl(*words)), cluster.place / "outputs" / "r"
    cluster.wait(lambda: len(steps(run)) >= 2 and (run / "mlflow_run_id").exists())
    tracked = (run / "mlflow_run_id").read_text()
    cluster.run(["scancel", "--signal=USR2", job])
    cluster.wait(lambda: (run / "configs" / "attempt_2" / "resolved.yaml").exists())
    (stopped,) = run.glob("configs/attempt_1/stopped_at.json")
    step = json.loads(stopped.read_text())["step"]
    before = steps(run)
    assert before == list(range(1, step + 1)), "no step was lost, none was trained after the checkpoint"
    resumed = yaml.safe_load((run / "configs" / "attempt_2" / "resolved.yaml").read_text())["run"]["resume"]
    assert resumed == str(run / "checkpoints" / f"step_{step}")
    cluster.wait(lambda: len(steps(run)) > step)
    assert steps(run)[: step + 1] == list(range(1, step + 2))
    assert (run / "mlflow_run_id").read_text() == tracked
    everybody = cluster.processes(str(run))
    assert everybody
    cluster.run(["scancel", job])
    assert cluster.ended(job).startswith("CANCELLED")
    cluster.wait(lambda: cluster.processes(str(run)) == [], 60)


def test_a_job_that_makes_no_step_is_ended_by_the_watchdog_and_told(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    words = [*SMALL, "max_steps=3", "cluster=slurm", "cluster.step_timeout=0.5", "run.name=stuck"]
    job, run = submitted(cluster.prl(*words)), cluster.place / "outputs" / "stuck"
    assert cluster.ended(job) == "FAILED"
    assert "no step within cluster.step_timeout = 0.5 s" in logs(run) and steps(run) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["cluster.partition=gpu"], "cluster.partition = gpu: no such partition. Valid: low, main."),
        (["cluster.gpus_per_node=9"], "cluster.gpus_per_node = 9: the nodes of the cluster have at most 8"),
        (["cluster.time=soon"], "cluster.time = soon: not a time limit"),
        (["output_dir=/proc/here"], "output_dir = /proc/here/x: /proc cannot be written to"),
        (["cluster.train_nodes=4", "cluster.train_ranks=4"], "cluster = slurm: sbatch refuses the job"),
    ],
)
def test_bad_input_is_refused_before_submission(cluster: Any, words: list[str], told: str) -> None:
    answer = cluster.prl("cluster=slurm", "run.name=x", *words)
    assert answer.returncode == 2 and told in answer.stderr, answer.stderr
    assert not cluster.run(["squeue", "--noheader"]).stdout.strip()
    assert list(cluster.place.iterdir()) == []


def test_a_machine_without_sbatch_says_so_but_shows_the_script(cluster: Any) -> None:
    bare = {**cluster.environment, "PATH": str(Path(sys.executable).parent)}
    command = [sys.executable, "-m", "prl", "cluster=slurm", "run.name=x"]
    answer = subprocess.run(command, cwd=cluster.place, env=bare, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 2 and re.search(r"cluster = slurm: sbatch.* not found", answer.stderr)
    command.append("dry_run=true")
    shown = subprocess.run(command, cwd=cluster.place, env=bare, capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and "#SBATCH --job-name=x" in shown.stdout
