from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from synthetic_runs import Shape, write_configs, write_run

from prl.dashboard import configs, logs
from prl.dashboard.catalog import Run
from prl.dashboard.series import MetricTable
from prl.dashboard.timeline import timeline, verdict


@pytest.fixture
def run(tmp_path: Path) -> Run:
    write_run(tmp_path, Shape(episodes=128))
    return Run("id", tmp_path.resolve(), tmp_path.resolve())


def shown(run: Run, **asked: object) -> list[tuple[str, str]]:
    return [(line[1], line[3]) for line in logs.merged(run, 1, logs.Filter(**asked))["lines"]]  # type: ignore[arg-type]


def test_logs_of_all_processes_are_one_in_time_also_past_midnight(run: Run) -> None:
    told = logs.merged(run, 1, logs.Filter())
    assert [(time, name) for time, name, _, _ in told["lines"]] == [
        ("23:59:58", "orchestrator"),
        ("23:59:59", "trainer/0"),
        ("+1d 00:00:00", "inference"),
        ("+1d 00:00:01", "orchestrator"),
        ("+1d 00:00:02", "trainer/0"),
        ("+1d 00:00:02", "trainer/0"),
        ("+1d 00:00:02", "trainer/0"),
    ]
    assert set(told["components"]) == {"inference", "orchestrator", "trainer/0"}


def test_a_traceback_belongs_to_its_line(run: Run) -> None:
    assert [text for _, text in shown(run, level="ERROR")] == [
        "prl.trainer it broke",
        "Traceback (most recent call last):",
        "  ValueError: no <script>alert(1)</script>",
    ]


def test_json_lines_merge_with_text_and_bring_their_tracebacks(run: Run) -> None:
    told = {
        "level": "ERROR",
        "process": "env/words",
        "logger": "prl.env",
        "message": "no <b>score</b>\nat all",
    }
    told |= {"time": "2026-12-01T00:00:01.500+00:00", "exception": "Traceback:\n  ValueError: no"}
    log = run.path / "logs" / "attempt_1" / "env" / "words.log"
    log.parent.mkdir()
    log.write_text(f"23:59:57 INFO prl.env text first\n{json.dumps(told)}\nprinted by C\n")
    lines = logs.merged(run, 1, logs.Filter(components=("env/words",)))["lines"]
    assert [(time, level, text) for time, _, level, text in lines] == [
        ("23:59:57", "INFO", "prl.env text first"),
        ("+1d 00:00:01", "ERROR", "prl.env no <b>score</b>"),
        ("+1d 00:00:01", "ERROR", "at all"),
        ("+1d 00:00:01", "ERROR", "Traceback:"),
        ("+1d 00:00:01", "ERROR", "  ValueError: no"),
        ("+1d 00:00:01", "ERROR", "printed by C"),
    ]


def test_logs_are_filtered_by_level_component_and_text(run: Run) -> None:
    assert {name for name, _ in shown(run, components=("inference",))} == {"inference"}
    assert shown(run, level="WARNING", components=("orchestrator",)) == [
        ("orchestrator", "prl.orchestrator few rollouts carry credit")
    ]
    assert [name for name, _ in shown(run, text="SERVING")] == ["inference"]
    assert shown(run, text="nowhere") == []


def test_of_many_lines_the_newest_are_shown(run: Run) -> None:
    log = run.path / "logs" / "attempt_1" / "inference.log"
    log.write_text("".join(f"00:00:{i % 60:02} INFO prl.inference line {i:06}\n" for i in range(60)) * 1000)
    told = logs.merged(run, 1, logs.Filter(components=("inference",), limit=10))
    assert len(told["lines"]) == 10
    assert told["lines"][-1][3].endswith("line 000059")
    assert told["found"] < 60_000  # only the end of the file was looked at


def test_a_log_that_leads_elsewhere_is_left_out(run: Run, tmp_path_factory: pytest.TempPathFactory) -> None:
    secret = tmp_path_factory.mktemp("outside") / "secret.log"
    secret.write_text("00:00:00 INFO hush hush\n")
    (run.path / "logs" / "attempt_1" / "linked.log").symlink_to(secret)
    assert "linked" not in logs.components(run, 1)
    assert shown(run, text="hush") == []


def test_an_attempt_that_never_was_has_no_lines(run: Run) -> None:
    assert logs.merged(run, 7, logs.Filter()) == {"components": {}, "found": 0, "lines": []}


def test_a_config_is_flat() -> None:
    tree = {"optim": {"lr": 1e-4, "betas": [0.9, 0.99]}, "env": {}, "name": "x", "none": None}
    assert configs.flat(tree) == {
        "optim.lr": "0.0001",
        "optim.betas": "[0.9, 0.99]",
        "env": "{}",
        "name": "x",
        "none": "null",
    }


def test_only_what_differs_is_told() -> None:
    rows = configs.differences([{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1", "c": "4"}])
    assert rows == [
        {"path": "b", "values": ["2", "3", None]},
        {"path": "c", "values": [None, None, "4"]},
    ]
    assert configs.differences([{"a": "1"}]) == []


def test_the_command_line_keeps_its_secrets(run: Run) -> None:
    text = configs.command_of(run, 1)
    assert "hush" not in text and "optim.lr=0.0003" in text and "2026-11-30" in text
    (run.path / "configs" / "attempt_1" / "command.txt").write_text("python 'api_key=hush\n")
    assert configs.command_of(run, 1) == ""
    assert configs.command_of(run, 5) == ""


def table_of(run: Run) -> MetricTable:
    table = MetricTable(run)
    table.refresh()
    return table


def test_the_parts_of_a_step_fill_it_and_end_where_its_line_was_written(run: Run) -> None:
    told = timeline(table_of(run), last=2)
    trainer, orchestrator = told["lanes"]
    assert (trainer["name"], orchestrator["name"]) == ("trainer", "orchestrator")
    assert [step["step"] for step in trainer["steps"]] == [3, 4]
    curve = table_of(run).curves()["trainer/time/step"]
    for step, end, length in zip(trainer["steps"], curve.times[-2:], curve.values[-2:], strict=True):
        parts = step["segments"]
        assert [what for what, _, _ in parts] == [
            "waits for rollouts",
            "collective and other",
            "loads the batch",
            "trains",
            "publishes weights",
        ]
        assert sum(seconds for _, _, seconds in parts) == pytest.approx(length, abs=1e-3)
        assert parts[-1][1] + parts[-1][2] == pytest.approx(end, abs=1e-2)
        assert all(a[1] + a[2] == pytest.approx(b[1], abs=1e-2) for a, b in pairwise(parts))


def test_the_share_of_waiting_is_over_the_whole_run(run: Run) -> None:
    waiting = timeline(table_of(run), last=1)["waiting"]
    assert waiting["trainer"] == pytest.approx(2.8 / 4.0)
    assert 0 < waiting["orchestrator"] < 0.3 / 4.0


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"trainer": 0.7, "orchestrator": 0.1}, "inference is the bottleneck"),
        ({"trainer": 0.1, "orchestrator": 0.5}, "training is the bottleneck"),
        ({"trainer": 0.1, "orchestrator": 0.05}, "balanced"),
        ({"trainer": None}, "balanced"),
    ],
)
def test_the_verdict_names_the_side_that_is_waited_for(shares: dict[str, float | None], words: str) -> None:
    assert words in verdict(shares)


def test_a_run_that_trains_alone_has_one_lane(tmp_path: Path) -> None:
    write_configs(tmp_path, Shape())
    write_run(tmp_path, Shape(episodes=64))
    (tmp_path / "metrics" / "orchestrator.jsonl").unlink()
    told = timeline(table_of(Run("id", tmp_path.resolve(), tmp_path.resolve())))
    assert [lane["name"] for lane in told["lanes"]] == ["trainer"]
