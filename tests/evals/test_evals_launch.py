"""What the launcher says when an evaluation is over: also where there is little to say, and little room."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from evals_lab import fill, make_config, make_run

import launchers.run_eval as launch
from launchers.interrupts import Interrupts
from launchers.local import Outcome
from launchers.run_directory import RunPlan
from launchers.site import Site
from prl.evals.sources import Key
from prl.run_dir import RunDir

A, B = Key(0, "toy", "a", 0), Key(0, "toy", "b", 0)
DONE = Outcome(0, "FINISHED")


def over(run: RunDir) -> launch.Evaluation:
    plan = RunPlan(run.path, run.checkpoints, None, 0, False)
    return launch.Evaluation(make_config(), plan, run, ["prl", "eval"], Interrupts(), Site())


def test_a_measured_evaluation_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, 1.0), (B, None)])
    assert over(run)._tell(DONE) == 0
    out, err = capsys.readouterr()
    assert "Evaluated toy: agent avg@1 1.000, 2 rollouts, 1 errors" in out and err == ""
    assert json.loads((run.path / "results.json").read_text())["complete"]


def test_nothing_measured_names_what_went_wrong_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, None), (B, None)])
    assert over(run)._tell(DONE) == 1
    reason = "no rollout ended well, so nothing was measured; the last one: ProviderError: broken"
    assert capsys.readouterr().err == f"the evaluation failed: {reason}\n"
    assert "ended: FAILED" in (run.path / "STATUS.md").read_text()


def test_an_interrupted_evaluation_keeps_its_code_and_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    fill(run, [(A, None)])
    assert over(run)._tell(Outcome(130, "KILLED", "received SIGINT")) == 130
    assert f"go on by: prl eval run.name={run.path.name} --resume" in capsys.readouterr().out


def test_the_line_that_goes_on_is_whole_and_may_be_repeated() -> None:
    """Without its environment and its sampling, it would be refused as another measurement."""
    words = ["python", "-m", "prl", "eval", "reverse_text", "-n", "4", "env=[a,b]", "run.clean=true"]
    line = launch.again(words, "it")
    assert line == "python -m prl eval reverse_text -n 4 'env=[a,b]' run.name=it --resume"
    assert launch.again(shlex.split(line), "it") == line


def test_results_that_do_not_fit_on_the_disk_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    run = make_run(tmp_path)
    fill(run, [(A, 1.0)])
    monkeypatch.setattr(launch, "write_results", full)
    monkeypatch.setattr(launch, "full_disk", lambda _: ["the disk is full"])
    monkeypatch.setattr("launchers.run.append_status", full)
    assert over(run)._tell(DONE) == 1
    out, err = capsys.readouterr()
    assert "Evaluated toy: agent avg@1 1.000" in out
    assert "the results could not be written: [Errno 28]" in err and "STATUS.md lacks this end" in err
    assert err.index("could not be written") < err.index("the disk is full")


def test_the_table_is_there_before_the_tracker_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, said = make_run(tmp_path), []
    fill(run, [(A, 1.0)])
    monkeypatch.setattr(launch, "announce", lambda _, text, *__: said.append(text))
    monkeypatch.setattr(launch.Evaluation, "_track", lambda *_: said.append("tracked"))
    monkeypatch.setattr(launch, "note_end", lambda *_: said.append("noted"))
    over(run)._tell(DONE)
    assert [text.split(":")[0].split("\n")[0] for text in said] == ["finished", "tracked", "noted"]
