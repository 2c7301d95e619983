"""One job: what is looked at before it is submitted, and what its command does while it waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.slurm import submit
from launchers.slurm.submit import look_ahead, placed, receipt, wait
from prl.config.compose import compose_job


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Jobs that were cancelled."""
    jobs: list[str] = []
    monkeypatch.setattr(submit, "cancel", jobs.extend)
    return jobs


def looks(log: Path, *lines: str) -> Callable[[str], dict[str, str]]:
    """SLURM's answers: the job runs as long as there are lines, and writes one between two looks."""
    left = list(lines)

    def look(job: str) -> dict[str, str]:
        if not left:
            return {}
        with log.open("a") as file:
            file.write(left.pop(0))
        return {job: "RUNNING"}

    return look


@pytest.mark.parametrize(("state", "code"), [("COMPLETED", 0), ("FAILED", 1), ("TIMEOUT", 1)])
def test_a_job_that_is_waited_for_shows_its_log_once_and_leaves_with_its_status(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    state: str,
    code: int,
) -> None:
    monkeypatch.setattr(submit, "ended_as", lambda jobs: dict.fromkeys(jobs, state))
    log, pauses = tmp_path / "log", []
    assert wait("7", log, 3.0, looks(log, "one\n", "two\n"), pauses.append) == code
    assert capsys.readouterr().out == f"one\ntwo\njob 7: {state}\n" and pauses == [3.0, 3.0]


def test_a_scheduler_that_cannot_tell_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "ended_as", lambda jobs: dict.fromkeys(jobs, "COMPLETED"))
    answers: list[dict[str, str] | None] = [None, {"7": "PENDING"}, None, {}]
    pauses: list[float] = []
    assert wait("7", tmp_path / "log", 1.0, lambda job: answers.pop(0), pauses.append) == 0
    assert len(pauses) == 3


def test_ctrl_c_cancels_the_job_that_is_waited_for(
    tmp_path: Path, cancelled: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    log = tmp_path / "log"
    assert wait("7", log, 1.0, looks(log, "one\n"), interrupt) == 130
    assert cancelled == ["7"] and "job 7 was cancelled" in capsys.readouterr().err


def test_the_receipt_says_how_to_follow_and_to_cancel(tmp_path: Path) -> None:
    told = receipt(2, "7", tmp_path, tmp_path / "log 0")
    assert "submitted job 7 on 2 nodes" in told and "scancel 7" in told and "squeue -j 7" in told
    assert f"tail -F '{tmp_path}/log 0'" in told


@pytest.mark.parametrize("command", ["rl", "sft", "inference", "eval"])
def test_a_taken_name_is_refused_before_the_job_waits_in_a_queue(command: str, tmp_path: Path) -> None:
    (tmp_path / "x" / "configs").mkdir(parents=True)
    config = compose_job(command, ["cluster=slurm", f"output_dir={tmp_path}"])
    config.run.name = "x"  # compose itself looks at the names of runs that can be resumed
    if command == "eval":
        config.env = compose_job("eval", ["env=[reverse_text]"]).env
    with pytest.raises(ValueError, match="exists"):
        look_ahead(command, config)


def test_an_export_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a run directory nor a complete checkpoint"):
        look_ahead("export", SimpleNamespace(run=str(tmp_path), step=None, out=None))


def test_what_is_placed_is_what_a_dry_run_shows(tmp_path: Path) -> None:
    config: Any = compose_job("rl", ["cluster=slurm", "cluster.infer_nodes=1"])
    assert {role.name: role.node for role in placed("rl", config, tmp_path)} == {
        "inference": 0,
        "env/reverse_text": 1,
        "orchestrator": 1,
        "trainer/0": 1,
    }
    assert placed("export", config, tmp_path) == []
