from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prl.dashboard.catalog import Run
from prl.dashboard.charts import CHARTS, curated
from prl.dashboard.series import MetricTable, thin


def run_with(tmp_path: Path, **streams: list[dict[str, Any]]) -> Run:
    for name, records in streams.items():
        append(tmp_path, name, *records)
    return Run("id", tmp_path.resolve(), tmp_path.resolve())


def append(path: Path, stream: str, *records: dict[str, Any]) -> None:
    (path / "metrics").mkdir(exist_ok=True)
    with (path / "metrics" / f"{stream}.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def line(step: int | None, time: float, **values: float) -> dict[str, Any]:
    return {"producer": "trainer", "step": step, "time": time, **values}


def test_points_of_a_curve_by_step_and_by_time(tmp_path: Path) -> None:
    table = MetricTable(run_with(tmp_path, trainer=[line(1, 10.0, loss=0.5), line(2, 14.0, loss=0.25)]))
    table.refresh()
    assert table.points("loss", "step", 100) == {"x": [1.0, 2.0], "y": [0.5, 0.25]}
    assert table.points("loss", "time", 100) == {"x": [10.0, 14.0], "y": [0.5, 0.25]}
    assert table.points("nothing", "step", 100) is None


def test_only_new_lines_change_the_revision(tmp_path: Path) -> None:
    table = MetricTable(run_with(tmp_path, trainer=[line(1, 10.0, loss=0.5)]))
    first = table.refresh()
    assert table.refresh() == first
    append(tmp_path, "trainer", line(2, 11.0, loss=0.4))
    assert table.refresh() > first
    assert table.last_values() == {"loss": 0.4}


def test_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    run = run_with(tmp_path, trainer=[line(1, 10.0, loss=0.5)])
    table = MetricTable(run)
    with (tmp_path / "metrics" / "trainer.jsonl").open("a") as file:
        file.write('{"producer": "trainer", "step": 2')
    table.refresh()
    with (tmp_path / "metrics" / "trainer.jsonl").open("a") as file:
        file.write(', "time": 11.0, "loss": 0.25}\n')
    table.refresh()
    assert table.points("loss", "step", 100) == {"x": [1.0, 2.0], "y": [0.5, 0.25]}


def test_a_resume_makes_later_steps_void(tmp_path: Path) -> None:
    records = [line(step, float(step), loss=float(step)) for step in range(1, 6)]
    marker = {"producer": "launcher", "step": None, "time": 6.0, "attempt": 2, "resumed_from": 3}
    table = MetricTable(run_with(tmp_path, trainer=[*records, marker, line(4, 7.0, loss=40.0)]))
    table.refresh()
    assert table.points("loss", "step", 100) == {"x": [1.0, 2.0, 3.0, 4.0], "y": [1.0, 2.0, 3.0, 40.0]}


def test_a_value_without_a_step_stands_at_the_newest_step_of_its_time(tmp_path: Path) -> None:
    records = [line(1, 10.0, loss=1.0), line(2, 20.0, loss=1.0), line(3, 30.0, loss=1.0)]
    waits = [line(None, at, queue=at) for at in (5.0, 10.0, 25.0, 99.0)]
    table = MetricTable(run_with(tmp_path, trainer=records, inference=waits))
    table.refresh()
    assert table.points("queue", "step", 100) == {"x": [0.0, 1.0, 2.0, 3.0], "y": [5.0, 10.0, 25.0, 99.0]}


def test_the_same_time_of_two_producers_is_two_curves(tmp_path: Path) -> None:
    other = {"producer": "orchestrator", "step": 1, "time": 2.0, "time/step": 7.0}
    table = MetricTable(
        run_with(tmp_path, orchestrator=[other], trainer=[{**line(1, 1.0), "time/step": 3.0}])
    )
    table.refresh()
    assert table.last_values() == {"orchestrator/time/step": 7.0, "trainer/time/step": 3.0}


def test_another_run_in_the_same_directory_starts_over(tmp_path: Path) -> None:
    run = run_with(tmp_path, trainer=[line(step, float(step), loss=1.0) for step in range(1, 9)])
    table = MetricTable(run)
    table.refresh()
    (tmp_path / "metrics" / "trainer.jsonl").unlink()
    table.refresh()
    assert table.curves() == {}
    append(tmp_path, "trainer", line(1, 50.0, loss=9.0))
    table.refresh()
    assert table.points("loss", "step", 10) == {"x": [1.0], "y": [9.0]}


def test_thinning_keeps_ends_and_every_spike() -> None:
    x = np.arange(100_000.0)
    y = np.sin(x / 5000.0)
    y[[123, 45_678]] = [50.0, -50.0]
    thin_x, thin_y = thin(x, y, 600)
    assert len(thin_x) <= 604
    assert (thin_x[0], thin_x[-1]) == (0.0, 99_999.0)
    assert thin_y.max() == 50.0 and thin_y.min() == -50.0
    assert np.all(np.diff(thin_x) > 0)
    assert all(y[int(at)] == value for at, value in zip(thin_x, thin_y, strict=True))


@pytest.mark.parametrize("size", [0, 1, 5])
def test_few_points_stay_as_they_are(size: int) -> None:
    x = np.arange(float(size))
    assert thin(x, x, 600)[0].tolist() == x.tolist()


def test_every_curated_chart_finds_the_metrics_of_a_run() -> None:
    names = [
        "train/agg/effective/agent/reward/mean",
        "train/agg/effective/num_turns/mean",
        "train/agg/effective/agent/num_output_tokens/mean",
        "mismatch_kl/all/mean",
        "mismatch_kl/all/max",
        "trainer/time/wait_for_batch",
        "orchestrator/time/wait_for_policy",
        "eval/gsm8k/avg_at_4",
        "something/else",
    ]
    charts = {chart["title"]: chart["keys"] for chart in curated(names)}
    assert charts == {
        "Reward": ["train/agg/effective/agent/reward/mean"],
        "Evaluation": ["eval/gsm8k/avg_at_4"],
        "Mismatch KL": ["mismatch_kl/all/max", "mismatch_kl/all/mean"],
        "Waiting (s)": ["orchestrator/time/wait_for_policy", "trainer/time/wait_for_batch"],
        "Output tokens": ["train/agg/effective/agent/num_output_tokens/mean"],
    }
    assert len({chart.title for chart in CHARTS}) == len(CHARTS)
