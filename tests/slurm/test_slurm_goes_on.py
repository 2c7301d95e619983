"""A run of two nodes that is warned and then loses a node goes on; what comes after training is a job too."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from slurm_runs import steps

pytestmark = pytest.mark.slurm

WORDS = [
    "sft",
    "data.batch_size=4",
    "tracking=none",
    "ckpt=interval",
    "ckpt.interval=10",
    "log.display=plain",
]
WAITED = ["tracking=none", "cluster=slurm", "cluster.wait=true", "cluster.poll_seconds=0.5"]
TWO = ["cluster=slurm", "cluster.train_nodes=2", "cluster.train_ranks=2", "cluster.time=60"]


def resumed_from(run: Path, attempt: int) -> int:
    told = yaml.safe_load((run / "configs" / f"attempt_{attempt}" / "resolved.yaml").read_text())
    return int(Path(told["run"]["resume"]).name.removeprefix("step_"))


def complete(run: Path) -> list[int]:
    return sorted(int(path.parent.name.removeprefix("step_")) for path in run.glob("checkpoints/*/COMPLETE"))


def test_training_goes_on_after_a_warning_and_after_the_loss_of_a_node_and_is_used(
    cluster: Any, node: Callable[..., None], submitted: Callable[..., str]
) -> None:
    job = submitted(cluster.prl(*WORDS, "max_steps=1000000", *TWO, "run.name=s"))
    run = cluster.place / "outputs" / "s"
    cluster.wait(lambda: len(steps(run)) >= 2 or not cluster.queue(job))

    cluster.run(["scancel", "--signal=USR2", job])
    cluster.wait(lambda: (run / "configs" / "attempt_2" / "resolved.yaml").exists())
    stopped = json.loads((run / "configs" / "attempt_1" / "stopped_at.json").read_text())["step"]
    assert resumed_from(run, 2) == stopped and steps(run)[:stopped] == list(range(1, stopped + 1))
    kept = {path.name for path in (run / "checkpoints" / f"step_{stopped}" / "trainer").glob("*.distcp")}
    assert kept == {"__0_0.distcp", "__1_0.distcp"}, "both ranks, at one step"

    cluster.wait(lambda: max(complete(run), default=0) > stopped)
    lost = node_of(cluster, run, "sft/1")
    everybody = [process for process in cluster.processes(str(run)) if node_name(process) != lost]
    node("down", lost)
    before = max(complete(run))
    cluster.wait(lambda: (run / "configs" / "attempt_3" / "resolved.yaml").exists())
    assert resumed_from(run, 3) >= before, "the last complete checkpoint"
    assert not [process for process in everybody if process.is_running() and process.status() != "zombie"]
    cluster.wait(lambda: steps(run)[-1] > resumed_from(run, 3) or not cluster.queue(job))
    told = (run / "STATUS.md").read_text()
    assert re.findall(r"attempt (\d) started", told) == ["1", "2", "3"]
    cluster.run(["scancel", job])
    assert cluster.ended(job).startswith("CANCELLED")
    cluster.wait(lambda: cluster.processes(str(run)) == [], 60)

    exported = cluster.prl("export", f"run={run}", *WAITED[1:])
    assert exported.returncode == 0, exported.stdout + exported.stderr
    (weights,) = run.glob("checkpoints/*/weights/model.safetensors")
    assert str(weights.parent) in exported.stdout
    few = ["-n", "2", "-r", "1", "--sampling.max_tokens", "8", "run.name=e", *WAITED]
    measured = cluster.prl("eval", "reverse_text", "-m", str(weights.parent), *few)
    assert measured.returncode == 0, measured.stdout + measured.stderr
    assert "avg@1" in measured.stdout and (cluster.place / "outputs" / "e" / "results.md").exists()
    again = cluster.prl("eval", "reverse_text", "-m", str(weights.parent), *few)
    assert again.returncode == 2 and "exists" in again.stderr, "known before it waits in a queue"


def node_of(cluster: Any, run: Path, role: str) -> str:
    (process,) = [p for p in cluster.processes(str(run / "configs")) if p.cmdline()[3] == role]
    return node_name(process)


def node_name(process: Any) -> str:
    return process.environ()["SLURMD_NODENAME"]


def test_an_engine_is_served_by_a_job_until_it_is_cancelled(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    job = submitted(cluster.prl("inference", "cluster=slurm", "run.name=i"))
    log = cluster.place / "outputs" / "i" / "slurm" / job / f"{job}_0_log.out"
    cluster.wait(lambda: (log.exists() and "serving" in log.read_text()) or not cluster.queue(job))
    found = re.search(r"serving \S+ on (http\S+)/v1", log.read_text())
    assert found is not None, log.read_text()
    ask = f"import urllib.request as u; print(u.urlopen('{found[1]}/health', timeout=60).status)"
    srun = ["srun", "--overlap", f"--jobid={job}", "python3", "-c", ask]
    answer = cluster.run(srun)
    assert answer.stdout.strip() == "200", answer.stderr
    cluster.run(["scancel", job])
    assert cluster.ended(job).startswith("CANCELLED")
    cluster.wait(lambda: cluster.processes(str(log.parents[2])) == [], 60)
