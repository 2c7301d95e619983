"""A sweep over SLURM before anything is submitted: its script, what is refused, and what each task is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.slurm import job
from launchers.slurm.request import merge_options
from launchers.sweeps import element as element_module
from launchers.sweeps.command import began_earlier, dry_run, hydra_facts, open_book
from launchers.sweeps.element import Element
from launchers.sweeps.over_slurm import LAUNCHER, array_request, check_array, one_cluster
from prl.config.command_line import CommandLine, parse
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors

SWEEP = ["--multirun", "max_steps=1", "seed=1,2", "cluster=slurm"]


def line_of(*words: str) -> CommandLine:
    return parse([*SWEEP, *words], ["rl"])


def configs_of(*words: str) -> list[Any]:
    return [compose_job("rl", ["max_steps=1", f"seed={seed}", "cluster=slurm", *words]) for seed in (1, 2)]


def header(text: str) -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))


def test_what_was_typed_wins_over_cluster_and_tables_are_joined() -> None:
    wanted = {"nodes": 2, "comment": "a", "additional_parameters": {"requeue": True, "x": 1}}
    options = {"nodes": 1, "comment": "typed", "mail_type": None, "additional_parameters": {"x": 2}}
    merged = merge_options(options, wanted, {"comment", "additional_parameters"})
    assert merged == {
        "nodes": 2,
        "comment": "typed",
        "mail_type": None,
        "additional_parameters": {"requeue": True, "x": 2},
    }
    assert merge_options(options, wanted, ())["additional_parameters"] == {"requeue": True, "x": 1}


def test_the_dry_run_shows_what_the_launcher_will_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.comment=hi",
        "hydra.launcher.array_parallelism=1",
    ]
    line = line_of("hydra.sweep.dir=here", "cluster.infer_nodes=1", *typed)
    assert dry_run(line, configs_of("cluster.infer_nodes=1"), [["seed=1"], ["seed=2"]]) == 0
    told = capsys.readouterr().out
    asked = header(told)
    assert asked["array"] == "0-1%1" and asked["comment"] == "hi" and asked["nodes"] == "2"
    assert asked["job-name"] == "here" and asked["output"].startswith(f"{tmp_path}/here/.submitit/%A_%a/")
    assert re.search(r"^0 +inference +server", told, re.MULTILINE), "the placement"
    assert re.search(r"^1 +trainer/0 +job", told, re.MULTILINE)
    assert f"output_dir: {tmp_path}/here" in told and "element 1    seed=2" in told
    assert list(tmp_path.iterdir()) == []


def test_a_search_submits_its_trials_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hydra_facts(line_of()).batch is None
    facts = hydra_facts(line_of("hydra/sweeper=optuna", "hydra.sweeper.n_jobs=3"))
    assert facts.batch == 3 and facts.launcher == "basic"


def request(tmp_path: Path, configs: list[Any], *words: str) -> Any:
    return array_request(line_of(*words), configs[0].cluster, "basic", tmp_path / "sweep", wait=False)


def test_an_array_that_cannot_be_placed_is_refused(tmp_path: Path) -> None:
    configs = configs_of("cluster.gpus_per_node=2", "inference.replicas=1")
    for config in configs:  # stands for an engine that this environment does not have
        config.inference = SimpleNamespace(
            name="vllm", ready_timeout=1.0, replicas=1, tensor_parallel_size=4, python=None
        )
    with pytest.raises(ConfigErrors, match="tensor_parallel_size = 4"):
        check_array(request(tmp_path, configs), "rl", configs[0].cluster, configs, 2)


def test_a_machine_without_slurm_refuses_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    configs = configs_of()
    with pytest.raises(ConfigErrors, match="sbatch, srun"):
        check_array(request(tmp_path, configs), "rl", configs[0].cluster, configs, 2)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_written_to_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigErrors, match=r"hydra.sweep.dir = .*file/s: cannot be written to"):
        open_book(line_of(), tmp_path / "file" / "s", [["seed=1"]])


def test_the_same_command_finds_its_sweep_unless_it_names_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = hydra_facts(line_of())
    assert began_earlier(line_of(), facts) is None
    open_book(line_of(), tmp_path / "multirun" / "s", [["seed=1"]])
    assert began_earlier(line_of(), facts) == Path("multirun/s")
    assert began_earlier(line_of("optim.lr=1"), facts) is None
    assert began_earlier(line_of("hydra.sweep.dir=x"), hydra_facts(line_of("hydra.sweep.dir=x"))) is None


def test_the_elements_of_an_array_share_their_resources() -> None:
    one, other = configs_of()[0], configs_of("cluster.infer_nodes=1")[0]
    assert one_cluster([one, one]) is one.cluster
    with pytest.raises(ConfigErrors, match="the same resources"):
        one_cluster([one, other])


@pytest.mark.parametrize("asked", [{"nodes": 1}, {}])
def test_an_element_is_a_task_of_its_job_whatever_the_cluster_option_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any]
) -> None:
    """`cluster=ours` may have the fields of `cluster=slurm`; without a request only a launcher was chosen."""
    entered: list[str] = []
    monkeypatch.setattr(job, "enter_task", lambda: entered.append("task"))
    monkeypatch.setattr(element_module, "current_site", lambda: Follows(tmp_path / "0"))
    Element(line_of("cluster=ours"), tmp_path, 7.0, request=asked)._in_array(0, ["seed=1"])
    assert entered == ["task"] * bool(asked)


class Follows:
    """The site of a task that does not lead."""

    leads = False

    def __init__(self, run: Path) -> None:
        self.run = run

    def follow(self, path: Path, seconds: float) -> int:
        assert (path, seconds) == (self.run, 7.0)
        return 0


def test_the_launcher_is_one_that_hydra_finds() -> None:
    assert hydra_facts(line_of(f"hydra/launcher={LAUNCHER}")).launcher == LAUNCHER


@pytest.mark.parametrize("words", [["run.name=x"], ["--multirun", "seed=1,2"]])
def test_what_sbatch_refuses_at_last_is_one_line(tmp_path: Path, words: list[str]) -> None:
    """A limit of the account is met when a job is really submitted, not when sbatch is asked before."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("srun", "squeue", "scontrol", "scancel", "sinfo", "sacct", "sbatch"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    limit = "case $* in *--test-only*) ;; *) echo 'sbatch: error: QOSMaxSubmitJob' >&2; exit 1;; esac"
    (tools / "sbatch").write_text(f"#!/bin/sh\n{limit}\n")
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    command = [sys.executable, "-m", "prl", *words, "max_steps=1", "cluster=slurm"]
    told = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    said = told.stdout + told.stderr
    assert told.returncode != 0 and "Traceback" not in said
    assert "cluster = slurm: sbatch refuses the job: QOSMaxSubmitJob" in said
