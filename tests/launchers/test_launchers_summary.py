from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import launchers.run
import launchers.summary
from launchers.interrupts import Interrupts
from launchers.local import Outcome
from launchers.run import Attempt
from launchers.run_directory import RunPlan
from launchers.site import Site
from launchers.summary import curve, failure_report, summary
from prl.run_dir import RunDir
from prl.tracking.board import Board
from prl.tracking.reader import Record

FINISHED = Outcome(0, "FINISHED")


def board(producer: str, key: str, values: list[float]) -> Board:
    found = Board(30)
    found.update(
        Record(producer, step, 0.0, {key: value, "optim/lr": 1e-4})
        for step, value in enumerate(values, start=1)
    )
    return found


def plan_of(run: RunDir) -> RunPlan:
    return RunPlan(run.path, run.checkpoints, None, 0, False)


def test_curve_has_the_means_of_both_ends_and_every_step() -> None:
    lines = curve("reward", {step: step / 100 for step in range(1, 13)})
    assert lines[0] == "reward: first 5 steps 0.030, last 5 steps 0.100 (+0.070)"
    assert lines[1].split() == ["from", "step", "1", *(f"{n / 100:.3f}" for n in range(1, 11))]
    assert lines[2].split() == ["from", "step", "11", "0.110", "0.120"]


def test_curve_of_a_long_run_is_a_screen_of_means() -> None:
    lines = curve("reward", {step: float(step) for step in range(1, 182)})
    assert lines[0].endswith("; below, means of 4 steps")
    assert lines[1].split()[:5] == ["from", "step", "1", "2.500", "6.500"] and len(lines) == 6
    assert lines[-1].split()[2] == "161" and lines[-1].split()[-1] == "181.000"


def test_curve_of_few_steps_and_of_none() -> None:
    assert curve("reward", {1: 0.5, 2: 0.25})[0] == "reward: first step 0.500, last step 0.250 (-0.250)"
    five = curve("reward", {1: 0.5, 2: 0.5, 3: 1.0, 4: 0.0, 5: 0.0})
    assert five[0] == "reward: first 2 steps 0.500, last 2 steps 0.000 (-0.500)", "no step counts twice"
    assert curve("reward", {1: 0.5})[0] == "reward: first step 0.500, last step 0.500 (+0.000)"
    assert curve("reward", {}) == []


def test_summary_says_where_everything_is(run: RunDir, checkpoint: Callable[[Path, int], Path]) -> None:
    run.traces.mkdir()
    checkpoint(run.checkpoints, 2)
    rewards = board("orchestrator", "train/agg/effective/agent/reward/mean", [0.25, 0.5])
    text = summary(
        FINISHED, run, plan_of(run), rewards, "mlflow ui --backend-store-uri sqlite:////x/mlflow.db"
    )
    for place in (run.path, run.logs, run.metrics, run.traces, f"{run.checkpoints} (steps 2)"):
        assert str(place) in text
    assert "reward: first step 0.250, last step 0.500" in text and "loss" not in text
    assert text.splitlines()[-1].split(maxsplit=1) == [
        "MLflow",
        "mlflow ui --backend-store-uri sqlite:////x/mlflow.db",
    ]


def test_summary_of_sft_has_the_loss_and_leaves_out_what_is_not_there(run: RunDir) -> None:
    text = summary(FINISHED, run, plan_of(run), board("sft", "loss/mean", [2.0, 1.0]), None)
    assert text.startswith("finished at step 2\nloss: first step 2.000, last step 1.000")
    assert "MLflow" not in text and "traces" not in text and "checkpoints none" in text


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_summary_tells_how_it_ended(status: str, run: RunDir) -> None:
    outcome = Outcome(1, status, "because")  # type: ignore[arg-type]
    assert summary(outcome, run, plan_of(run), Board(), None).startswith(
        f"{status.lower()} at step 0: because\n"
    )


def test_a_failure_shows_the_end_of_each_log_at_fault(run: RunDir) -> None:
    for name, text in (("env/x", "one\ntwo\n"), ("trainer/0", "")):
        run.log_file(name).parent.mkdir(parents=True, exist_ok=True)
        run.log_file(name).write_text(text)
    report = failure_report(Outcome(1, "FAILED", "they died", ("env/x", "trainer/0")), run)
    assert report.splitlines() == [
        "the run failed: they died",
        f"--- end of {run.log_file('env/x')} ---",
        "one",
        "two",
        f"--- end of {run.log_file('trainer/0')} ---",
        "(empty)",
    ]


def test_a_full_disk_is_told_where_the_logs_could_not(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launchers.summary, "shutil", SimpleNamespace(disk_usage=lambda _: disk))
    disk = SimpleNamespace(free=4096)
    report = failure_report(Outcome(1, "FAILED", "they died"), run)
    assert f"the disk is full: 4096 bytes are free at {run.path}" in report.splitlines()[-1]
    disk = SimpleNamespace(free=1 << 30)
    assert failure_report(Outcome(1, "FAILED", "they died"), run) == "the run failed: they died"


def test_a_status_that_cannot_be_written_hides_no_end(
    run: RunDir, config: Callable, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launchers.run, "append_status", full)
    attempt = Attempt("rl", config(), plan_of(run), run, [], Interrupts(), Site())
    attempt._tell_end(FINISHED, board("trainer", "reward/mean", []), None)
    out, err = capsys.readouterr()
    assert out.startswith("finished at step") and "No space left on device" in err
