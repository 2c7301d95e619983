"""Sweeps as SLURM arrays: each fault of the stock launcher is cured, and elements are whole runs."""

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

pytestmark = pytest.mark.slurm

APP = """
import os, pathlib, sys, time
import hydra
from hydra.core.hydra_config import HydraConfig
from launchers.sweep import find_plugins

find_plugins()

@hydra.main(version_base="1.3", config_path=None)
def app(config):
    rank = os.environ["SLURM_PROCID"]
    pathlib.Path(HydraConfig.get().runtime.output_dir, f"seen_by_{rank}").write_text(str(os.getpid()))
    print("TASK", rank, flush=True)
    if config.how == "raise":
        raise ValueError("the reason is this")
    if config.how == "die":
        os._exit(7)
    time.sleep(float(config.get("seconds", 0)))
    return 1.0

app()
"""


@pytest.fixture
def app(cluster: Any) -> Callable[..., list[str]]:
    """The command line of a sweep of a small Hydra application that knows no prl."""
    script = cluster.place / "app.py"
    script.write_text(APP)
    plugins = Path(__file__).parents[2] / "launchers" / "plugins"
    setup = f"hydra.launcher.setup=['export PYTHONPATH={Path(__file__).parents[2]}:{plugins}']"

    def line(*words: str) -> list[str]:
        fixed = ["--multirun", "hydra/launcher=submitit_slurm", "hydra.sweep.dir=sweep", setup]
        return [sys.executable, str(script), *fixed, "hydra.launcher.poll_seconds=0.5", *words]

    return line


def job_in(cluster: Any) -> str:
    """The number of the array: an element that runs has one of its own beside it."""
    found: list[str] = []

    def there() -> bool:
        found[:] = cluster.run(["squeue", "--noheader", "-o", "%F"]).stdout.split()
        return bool(found)

    cluster.wait(there)
    return found[0]


def test_one_array_in_which_the_dead_are_seen_and_hide_nobody(cluster: Any, app: Callable) -> None:
    told = cluster.run(app("+how=raise,die,well,well", "+other=1", "hydra.launcher.array_parallelism=3"))
    assert told.returncode == 1, told.stdout + told.stderr
    jobs = {
        int(number): job
        for number, (job, _) in json.loads((cluster.place / "sweep/jobs.json").read_text()).items()
    }
    assert len({job.split("_")[0] for job in jobs.values()}) == 1 and len(jobs) == 4, "one array of four"
    (script,) = (cluster.place / "sweep/.submitit").glob("*/*_submission.sh")
    assert "#SBATCH --array=0-3%3" in script.read_text() and "--kill-on-bad-exit=1" in script.read_text()
    assert [cluster.state(jobs[number]) for number in range(4)] == [
        "FAILED",
        "FAILED",
        "COMPLETED",
        "COMPLETED",
    ]
    log = next((cluster.place / "sweep/.submitit" / jobs[0]).glob("*.err")).read_text()
    assert "ValueError: the reason is this" in log and "Traceback" in log
    ran = [number for number in range(4) if (cluster.place / "sweep" / str(number) / "seen_by_0").exists()]
    assert ran == [0, 1, 2, 3]


def test_ctrl_c_on_the_waiting_command_cancels_the_jobs(cluster: Any, app: Callable) -> None:
    process = subprocess.Popen(
        app("+how=well", "+seconds=600,601"),
        cwd=cluster.place,
        env=cluster.environment,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in background
    )
    job = job_in(cluster)
    cluster.wait((cluster.place / "sweep" / "jobs.json").exists)
    cluster.wait(lambda: "RUNNING" in cluster.queue(job))
    process.send_signal(signal.SIGINT)
    assert process.wait(120) != 0
    cluster.wait(lambda: not cluster.queue(job), 120)
    assert cluster.state(f"{job}_0").startswith("CANCELLED")


def test_the_tasks_of_an_element_share_no_file_of_hydra(cluster: Any, app: Callable) -> None:
    told = cluster.run(app("+how=well", "+x=1,2", "hydra.launcher.nodes=2"))
    assert told.returncode == 0, told.stdout + told.stderr
    for number in ("0", "1"):
        element = cluster.place / "sweep" / number
        assert {path.name for path in element.glob("seen_by_*")} == {"seen_by_0", "seen_by_1"}
        assert (element / ".hydra" / "config.yaml").exists()
        assert (element / "app.log").read_text().count("Starting with JobEnvironment") <= 1


SWEEP = [
    "--multirun",
    "sft",
    "debug=sft_smoke",
    "cluster=slurm",
    "cluster.wait=true",
    "cluster.poll_seconds=0.5",
]


def test_a_sweep_of_runs_ends_in_a_table_and_a_report_and_is_not_repeated(
    cluster: Any, submitted: Callable[..., str]
) -> None:
    two = ["cluster.train_nodes=2", "cluster.train_ranks=2"]
    words = ["sft", "--multirun", *SWEEP[2:], *two, "seed=1,2", "optim.lr=1e-4,3e-3", "max_steps=2"]
    refused = cluster.prl(*words, "cluster.partition=gpu")
    assert refused.returncode == 2 and "no such partition. Valid: low, main." in refused.stderr
    dry = cluster.prl(*words, "hydra.sweep.dir=multirun/s", "dry_run=true").stdout
    assert not (cluster.place / "multirun").exists(), "neither wrote anything"
    told = cluster.prl(*words, "hydra.sweep.dir=multirun/s")
    assert told.returncode == 0, told.stdout + told.stderr
    (script,) = (cluster.place / "multirun" / "s" / ".submitit").glob("*/*_submission.sh")
    shown = dry.split("--- sbatch script of 4 elements\n")[1].split("\ndry run:")[0]
    assert script.read_text().rstrip() == shown and "#SBATCH --nodes=2" in shown
    for number in range(4):
        logs = (cluster.place / "multirun" / "s" / ".submitit").glob(f"*_{number}/*_1_log.out")
        assert [re.findall(r"^node 1 .*: (.*)$", log.read_text(), re.MULTILINE) for log in logs] == [
            ["sft/1"]
        ]
    (sweep,) = (cluster.place / "multirun").iterdir()
    assert "submitted 4 elements" in told.stdout and "sweep: 4 runs, 0 failed" in told.stdout
    report = (sweep / "report.md").read_text()
    assert "4 runs: 4 finished" in report and "±" in report and "![learning curves](curves.svg)" in report
    assert (sweep / "curves.svg").exists() and (sweep / "parallel.svg").exists()
    (sweep / "records" / "2.json").unlink()
    again = cluster.prl(*words, "hydra.sweep.dir=multirun/s")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "submitted 1 elements" in again.stdout and f"goes on with {sweep}" in again.stdout
    assert len(list((sweep / "2" / "configs").glob("attempt_*"))) == 1, "the unfinished one began anew"
    assert [len(list((sweep / str(n) / "configs").glob("attempt_*"))) for n in (0, 1, 3)] == [1, 1, 1]


def test_values_that_optuna_chooses_run_as_an_array_and_only_what_failed_runs_again(cluster: Any) -> None:
    optuna = pytest.importorskip("optuna")
    fails_once = """cluster.setup=['test "$SLURM_ARRAY_TASK_ID" != 1 || exit 3']"""  # alone it is no array
    search = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "optim.lr=tag(log,interval(1e-5,1e-2))"]
    words = ["sft", "--multirun", *SWEEP[2:], *search, fails_once, "hydra.sweep.dir=multirun/o"]
    told = cluster.prl(*words)
    assert told.returncode == 1 and "sweep: 2 runs, 1 failed" in told.stdout, told.stdout + told.stderr
    assert "submitted 2 elements" in told.stdout and "element 1: FAILED" in told.stdout
    sweep = cluster.place / "multirun" / "o"
    tried = json.loads((sweep / "records" / "1.json").read_text())["overrides"]
    again = cluster.prl(*words)
    assert again.returncode == 0 and "submitted 1 elements" in again.stdout, again.stdout + again.stderr
    assert [len(list((sweep / n / "configs").glob("attempt_*"))) for n in ("0", "1")] == [1, 1]
    records = [json.loads((sweep / "records" / f"{number}.json").read_text()) for number in (0, 1)]
    assert records[1]["overrides"] == tried and "2 runs: 2 finished" in (sweep / "report.md").read_text()
    study = optuna.load_study(study_name="o", storage=f"sqlite:///{sweep}/optuna.db")
    assert [trial.value for trial in study.trials] == [record["objective"] for record in records]
