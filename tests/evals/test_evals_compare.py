"""Two evaluations, task by task."""

from __future__ import annotations

from pathlib import Path

import pytest
from evals_lab import fill, make_run

from prl.__main__ import main as prl
from prl.evals.compare import main
from prl.evals.sources import Key


def evaluation(path: Path, rewards: dict[str, list[float | None]], step: int = 0) -> str:
    run = make_run(path)
    fill(run, [(Key(step, "toy", task, i), r) for task, some in rewards.items() for i, r in enumerate(some)])
    return str(path)


def test_wins_losses_and_the_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluation(tmp_path / "a", {f"t{i}": [0.0, 0.5] for i in range(12)} | {"gone": [1.0], "lost": [None]})
    b = evaluation(tmp_path / "b", {f"t{i}": [0.5, 0.6 + 0.01 * i] for i in range(12)} | {"lost": [1.0]})
    assert main([a, b, "--tasks", "3"]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("toy  agent"))
    assert row.split()[2:5] == ["12", "0.250", "0.578"] and row.endswith("B is better")
    assert row.split()[-6:-3] == ["12", "0", "0"]
    assert "1 tasks only in A, 1 only in B" in out
    assert "toy: 1 rollouts failed in A, 0 in B; they are left out" in out
    assert out.count("\ntoy  agent  t") == 3 and "of 12 tasks that changed" in out


def test_no_clear_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluation(tmp_path / "a", {"x": [0.0], "y": [1.0], "z": [0.5]})
    b = evaluation(tmp_path / "b", {"x": [1.0], "y": [0.0], "z": [0.5]})
    assert prl(["eval", "compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "no clear difference" in out and "failed" not in out


def test_checkpoints_of_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path)
    entries = [(Key(step, "toy", f"t{i}", 0), step / 20) for step in (10, 20) for i in range(5)]
    fill(run, entries)
    assert main([f"{tmp_path}@10", str(tmp_path)]) == 0
    assert "+0.500" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a"], "two evaluations are compared, 1 were given"),
        (["RUN", "nowhere"], "nowhere is not there"),
        (["RUN", "EMPTY"], "it is no evaluation"),
        (["RUN@7", "RUN"], "no rollout of this step was finished"),
        (["RUN", "RUN", "--tasks"], "a number must follow"),
        (["RUN", "RUN", "--taks", "3"], "--taks: no such flag"),
        (["RUN", "OTHER"], "no measured task in common"),
    ],
)
def test_mistakes_are_told_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    run = evaluation(tmp_path / "run", {"x": [1.0]})
    other = evaluation(tmp_path / "other", {"y": [1.0]})
    (tmp_path / "empty").mkdir()
    places = {"RUN": run, "EMPTY": str(tmp_path / "empty"), "RUN@7": f"{run}@7", "OTHER": other}
    assert main([places.get(word, word) for word in words]) == 2
    captured = capsys.readouterr()
    assert expected in captured.err and "Traceback" not in captured.err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "usage: python -m prl eval compare" in capsys.readouterr().out
