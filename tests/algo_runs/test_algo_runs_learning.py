"""Each algorithm moves its own metric on the CPU default. The cases are those of `examples/algorithms`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from algo_run_lab import ROOT, environment


def _measure():
    spec = importlib.util.spec_from_file_location("measure", ROOT / "examples" / "algorithms" / "measure.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["measure"] = module
    spec.loader.exec_module(module)
    return module


measure = _measure()


@pytest.mark.slow
@pytest.mark.e2e
@pytest.mark.parametrize("algorithm", measure.CASES)
def test_it_moves_its_metric(algorithm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.chdir(tmp_path)
    curve = measure.curve(algorithm, measure.run(algorithm, 0, tmp_path / "runs"))
    first, last = measure.ends(curve)
    assert measure.CASES[algorithm].moved(first, last), (measure.CASES[algorithm].claim, curve)


def test_every_algorithm_has_a_case() -> None:
    from prl.algo import ALGORITHMS

    assert set(measure.CASES) == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", measure.CASES)
def test_every_case_composes(algorithm: str) -> None:
    from prl.config.compose import compose_job

    words = [f"algo={algorithm}", *measure.SMALL, *measure.CASES[algorithm].overrides]
    assert compose_job("rl", words).algo.name == algorithm


def test_no_movement_is_no_success() -> None:
    for name, case in measure.CASES.items():
        if name != "rae":
            assert not case.moved(0.5, 0.5), name
    assert not measure.CASES["rae"].moved(0.0, 0.4)
    assert measure.CASES["opd"].moved(-0.8, -0.3) and measure.CASES["grpo"].moved(0.2, 0.6)
    assert measure.CASES["sft"].moved(0.48, 0.3) and not measure.CASES["sft"].moved(0.48, 0.4)


def test_the_gap_is_that_of_the_worse_agent_over_the_last_steps(tmp_path: Path) -> None:
    import json

    rows = [
        {
            "train/agg/all/player0/reward/mean": reward,
            "train/agg/all/player1/reward/mean": 0.0,
            "algo/kuhn_poker/baseline/player0": 1.0,
            "algo/kuhn_poker/baseline/player1": 0.1,
        }
        for reward in (1.0, 2.0, 3.0, 4.0)
    ]
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "orchestrator.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert measure.baseline_gap(tmp_path) == pytest.approx([0.1, 0.5, 1.0, 2.0])
