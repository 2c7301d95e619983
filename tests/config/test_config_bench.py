"""`prl bench config`: what it measures and what it says of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prl.__main__ import main as prl
from prl.bench import config as bench


def test_the_table_and_its_verdict(monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "measure", lambda repeats: (0.2, {"--help": 0.1, "dry_run=true": 0.49}))
    assert prl(["bench", "config", "--json", str(tmp_path / "b.json")]) == 0
    out = capsys.readouterr().out
    assert "2.45 x" in out and "ABOVE" not in out
    assert json.loads((tmp_path / "b.json").read_text())["seconds"]["--help"] == 0.1
    monkeypatch.setattr(bench, "measure", lambda repeats: (0.2, {"--help": 0.51}))
    assert prl(["bench", "config"]) == 1
    assert "2.55 x  ABOVE THE LIMIT" in capsys.readouterr().out


def test_each_answer_is_called_in_turn_and_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    times = iter([9.0, 9.0, 1.0, 4.0, 2.0, 3.0])

    def timed(command: list[str], directory: Path) -> float:
        calls.append(command[-1])
        return next(times)

    monkeypatch.setattr(bench, "cpu_seconds", timed)
    assert bench.measure(2, {"a": ["x=1"]}) == (1.0, {"a": 3.0})
    assert calls == ["import hydra", "x=1"] * 3


def test_a_call_that_fails_is_no_answer(tmp_path: Path) -> None:
    assert bench.cpu_seconds([bench.sys.executable, "-c", "sum(range(10**6))"], tmp_path) > 0
    with pytest.raises(RuntimeError, match="is no answer"):
        bench.cpu_seconds([bench.sys.executable, "-c", "1/0"], tmp_path)
