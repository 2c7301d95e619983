from __future__ import annotations

import json
from pathlib import Path

import pytest

from prl.bench import tracking
from prl.bench.tracking import PAIR, Step, Timing, medians, summary, table
from prl.run_dir import RunDir
from prl.tracking.reader import read_metrics
from prl.tracking.stream import MetricStream


def test_the_overhead_is_the_difference_of_medians() -> None:
    without = [Timing(1.0, 0.5, 0.0), Timing(1.2, 0.5, 0.0), Timing(1.0, 0.7, 0.0), Timing(1.2, 0.7, 0.0)]
    tracked = [Timing(1.2, 0.63, 0.01), Timing(1.2, 0.63, 0.03), Timing(9.0, 0.9, 0.02)]
    found = summary(without, tracked, 60, 0.008)
    assert medians(tracked) == (1.2, 0.63, 0.02)
    assert found["cpu_overhead"] == pytest.approx(0.05) and found["wall_overhead"] == pytest.approx(
        1.2 / 1.1 - 1
    )
    assert found["log_share"] == pytest.approx(0.02 / 1.1) and found["noise"] == pytest.approx(0.2 / 0.6)
    text = table(found)
    assert "CPU of the trainer +5.00%" in text and "60 metrics in 20.00 ms" in text and "8.0 ms CPU" in text


def test_a_step_is_a_real_one_and_its_line_is_written(tmp_path: Path) -> None:
    step = Step(tmp_path, rows=1)
    assert len(step.run(1)) == 1
    run = RunDir(tmp_path)
    stream = MetricStream(run.metric_file("trainer"), "trainer")
    (timing,) = step.run(1, stream)
    step.close()
    assert 0 < timing.log < timing.wall and timing.cpu > 0
    (record,) = read_metrics(run.metrics)
    assert record.step == 2 and {"loss/mean", "optim/grad_norm", "entropy/all/mean"} <= record.values.keys()


def test_the_tool_prints_a_table_and_writes_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = []

    def measure(scratch: Path, steps: int, rows: int) -> dict[str, object]:
        asked.append((steps, rows))
        timing = Timing(1.0, 1.0, 0.0)
        return summary([timing] * 4, [timing] * 4, 60, 0.0)

    monkeypatch.setattr(tracking, "measure", measure)
    assert tracking.main(["--steps", "1", "--rows", "2", "--json", str(tmp_path / "b.json")]) == 0
    assert asked == [(2 * PAIR, 2)] and "overhead" in capsys.readouterr().out
    assert json.loads((tmp_path / "b.json").read_text())["metrics_per_step"] == 60
