"""What a sweep tells: its book, means over seeds, the report with its plots, the table."""

from __future__ import annotations

import json
import math
import statistics
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from launchers.sweeps.book import Book, Record, find
from launchers.sweeps.command import refuse_double_axes
from launchers.sweeps.objective import objective_of
from launchers.sweeps.report import choices_of, swept, write_report
from launchers.sweeps.statistics import mean_of
from launchers.sweeps.tell import lines_of, table, tell
from launchers.sweeps.tool import main
from launchers.sweeps.track import publish
from prl.config.errors import ConfigErrors
from prl.config.load import dump_resolved
from prl.config.schema import RlConfig
from prl.config.serving import MlflowConfig
from prl.run_dir import RunDir
from prl.tracking.mlflow_store import create_database, find_store
from prl.tracking.mlflow_sweep import PARENT_FILE, join_sweep

ELEMENTS = [
    ["max_steps=2", f"optim.lr={lr}", f"algo={algo}", f"seed={seed}"]
    for lr in ("1e-4", "1e-3")
    for algo in ("grpo", "max_rl")
    for seed in (1, 2)
]
OBJECTIVES = [0.1, 0.2, 0.5, 0.6, 0.3, 0.5, 0.9, None]


def reward_stream(run: Path, rewards: list[float]) -> None:
    (run / "metrics").mkdir(parents=True)
    rows = [
        {"producer": "orchestrator", "step": s, "time": s, "train/agg/effective/agent/reward/mean": r}
        for s, r in enumerate(rewards, 1)
    ]
    (run / "metrics" / "orchestrator.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def book(tmp_path: Path) -> Book:
    """A sweep of eight runs; the last one failed."""
    book = Book(tmp_path / "multirun" / "s")
    book.open("rl", ["optim.lr=1e-4,1e-3", "algo=grpo,max_rl", "seed=1,2"], ELEMENTS)
    for number, (overrides, value) in enumerate(zip(ELEMENTS, OBJECTIVES, strict=True)):
        code = 0 if value is not None else 3
        book.record(Record(number, overrides, code, value, f"9_{number}", f"/logs/{number}"))
        if value is not None:
            reward_stream(book.run(number), [value / 2, value])
    return book


def test_the_same_command_finds_its_sweep_and_another_does_not(book: Book) -> None:
    words = ["optim.lr=1e-4,1e-3", "algo=grpo,max_rl", "seed=1,2"]
    assert find(book.path.parent, "rl", words) == book
    assert find(book.path.parent, "sft", words) is None and find(book.path.parent, "rl", words[:2]) is None
    with pytest.raises(ValueError, match="holds the sweep of another command"):
        book.open("rl", ["other=1,2"], [])


def test_an_element_is_finished_only_by_its_record(book: Book) -> None:
    assert book.of(0) is not None and book.of(0).finished and not book.of(7).finished  # type: ignore[union-attr]
    book.forget(0)
    assert book.of(0) is None and 0 in book.elements()


def test_an_interval_over_seeds_is_students() -> None:
    values = [0.1, 0.4, 0.35, 0.2]
    mean = mean_of(values)
    assert mean.value == pytest.approx(statistics.mean(values))
    assert mean.half == pytest.approx(3.182 * statistics.stdev(values) / math.sqrt(4), rel=1e-4)
    assert mean_of([2.0]).half is None and str(mean_of([2.0])) == "2.0000"
    many = mean_of([0.0, 1.0] * 50)
    assert many.half == pytest.approx(1.96 * statistics.stdev([0.0, 1.0] * 50) / 10, rel=1e-6)


def test_choices_gather_seeds_and_the_best_is_first(book: Book) -> None:
    elements = book.elements()
    assert swept(elements) == ["optim.lr", "algo", "seed"]
    choices = choices_of(elements, book.records(), swept(elements))
    assert [(c.values["optim.lr"], c.values["algo"]) for c in choices] == [
        ("1e-3", "max_rl"),
        ("1e-4", "max_rl"),
        ("1e-3", "grpo"),
        ("1e-4", "grpo"),
    ]
    assert choices[0].mean is not None and choices[0].mean.count == 1 and choices[0].numbers == [6, 7]
    assert choices[1].mean is not None and choices[1].mean.value == pytest.approx(0.55)


def test_the_report_has_table_means_and_plots_that_are_pictures(book: Book) -> None:
    text = write_report(book).read_text()
    assert "8 runs: 7 finished, 1 failed, 0 not ended." in text
    assert "| 1e-4 | max_rl | 0.5500 ± 0.6353 | 2 |" in text and "| 1e-3 | max_rl | 0.9000 | 1 of 2 |" in text
    assert "| [7](7) | 1e-3 | max_rl | 2 | exit code 3 | - | 9_7 |" in text
    svg = "{http://www.w3.org/2000/svg}"
    curves = ET.parse(book.path / "curves.svg").getroot()
    lines = [line.get("points") for line in curves.iter(f"{svg}polyline")]
    assert len(lines) == 4 and all(line and len(line.split()) == 2 for line in lines)
    assert len(list(curves.iter(f"{svg}polygon"))) == 3, "a band for each choice with two seeds"
    parallel = ET.parse(book.path / "parallel.svg").getroot()
    assert len(list(parallel.iter(f"{svg}polyline"))) == 4
    assert {"optim.lr", "algo", "reward"} <= {text.text for text in parallel.iter(f"{svg}text")}


def test_the_table_shows_every_element_and_the_exit_code_is_of_the_failed(
    book: Book, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = table(lines_of(book))
    rows = shown.splitlines()
    assert rows[0].split() == ["overrides", "state", "objective", "job", "log"] and len(rows) == 9
    assert "max_steps" not in shown, "what all share is left out"
    assert "exit code 3" in rows[8] and "0.6000" in rows[4] and "9_3" in rows[4]
    assert tell(book) == 3
    assert "sweep: 8 runs, 1 failed\n  element 7: exit code 3" in capsys.readouterr().out


def test_elements_that_never_ran_are_told_and_are_a_failure(tmp_path: Path) -> None:
    book = Book(tmp_path)
    book.open("rl", ["seed=1,2"], [["seed=1"], ["seed=2"]])
    assert [line.state for line in lines_of(book)] == ["not run", "not run"] and tell(book) == 1
    assert main([str(tmp_path)]) == 1 and main([str(tmp_path / "none")]) == 2


def test_the_objective_is_evaluation_then_reward_then_loss(tmp_path: Path) -> None:
    assert objective_of(tmp_path) is None
    reward_stream(tmp_path, [0.0, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert objective_of(tmp_path) == ("reward", pytest.approx(0.3))
    rows = [
        {"producer": "orchestrator", "step": 1, "time": 1, "eval/a/effective/agent/avg@2": 0.1},
        {"producer": "orchestrator", "step": 3, "time": 2, "eval/a/effective/agent/avg@2": 0.6},
        {"producer": "orchestrator", "step": 3, "time": 2, "eval/b/effective/agent/avg@4": 0.8},
    ]
    (tmp_path / "metrics" / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert objective_of(tmp_path) == ("eval reward", pytest.approx(0.7))


def test_a_supervised_run_is_compared_by_its_loss(tmp_path: Path) -> None:
    (tmp_path / "metrics").mkdir()
    rows = [
        {"producer": "trainer", "step": s, "time": s, "loss/mean": 1 / s, "optim/lr": 1.0} for s in (1, 2)
    ]
    (tmp_path / "metrics" / "trainer.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert objective_of(tmp_path) == ("-loss", pytest.approx(-0.75))


@pytest.mark.parametrize("elements", [[["seed=1"], ["seed=2"]], [["optim.lr=1"]]])
def test_where_nothing_is_compared_no_plot_compares(tmp_path: Path, elements: list[list[str]]) -> None:
    book = Book(tmp_path)
    book.open("rl", ["x"], elements)
    for number, words in enumerate(elements):
        book.record(Record(number, words, 0, 1.0 + number))
        reward_stream(book.run(number), [1.0, 2.0])
    text = write_report(book).read_text()
    assert "parallel.svg" not in text and not (tmp_path / "parallel.svg").exists()
    assert "![learning curves](curves.svg)" in text


def test_a_sweep_without_a_tracker_publishes_nothing(book: Book) -> None:
    assert publish(book) is False


def test_the_parent_run_gets_the_report(book: Book, config: Callable) -> None:
    client = tracked_sweep(book, config(tracking=MlflowConfig()))
    write_report(book)
    assert publish(book) is True
    parent = client.get_run((book.path / PARENT_FILE).read_text().strip())
    names = {artifact.path for artifact in client.list_artifacts(parent.info.run_id)}
    assert names == {"report.md", "curves.svg", "parallel.svg"}
    assert parent.data.metrics["best_objective"] == 0.9 and parent.data.tags["best"].startswith("6: ")
    told = client.get_metric_history(parent.info.run_id, "objective")
    assert sorted((point.step, point.value) for point in told)[:2] == [(0, 0.1), (1, 0.2)]


def tracked_sweep(book: Book, config: RlConfig) -> MlflowClient:
    """Give the sweep a parent run in a store of its own, and its first element a config."""
    store = find_store(None, book.path)
    create_database(store)
    client = MlflowClient(store.uri)
    experiment = client.create_experiment("prl", artifact_location=store.artifacts.as_uri())
    join_sweep(client, experiment, book.path)
    run = RunDir(book.run(0))
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("rl", config))
    (run.configs.parent / "latest").symlink_to(run.configs.name)
    return client


def test_an_axis_named_twice_is_refused() -> None:
    refuse_double_axes([["seed=1", "algo=grpo"]])
    with pytest.raises(ConfigErrors, match="seed: swept twice"):
        refuse_double_axes([["seed=1", "seed=2"]])


@pytest.mark.parametrize("name", ["icepop_bounds", "lr_group_size", "staleness", "algorithms_losses"])
def test_ready_made_sweeps_compose_every_element(name: str) -> None:
    from prl.config.command_line import parse
    from prl.config.compose import open_options
    from prl.config.sweep_elements import elements

    line = parse([f"sweep={name}"], ["rl"])
    assert line.multirun, "a chosen sweep needs no --multirun"
    with open_options("rl", line.overrides) as options:
        found, problems = elements(options)
    counts = {"icepop_bounds": 8, "lr_group_size": 9, "staleness": 24, "algorithms_losses": 16}
    assert not problems and len(found) == counts[name] == len({tuple(element) for element in found})


def test_what_was_begun_goes_on_where_it_can(tmp_path: Path, checkpoint: Callable) -> None:
    from launchers.sweeps.element import going_on

    assert going_on(tmp_path, "rl") == []
    (tmp_path / "configs" / "attempt_1").mkdir(parents=True)
    assert going_on(tmp_path, "rl") == ["run.clean=true"] and going_on(tmp_path, "eval") == [
        "run.resume=latest"
    ]
    checkpoint(tmp_path / "checkpoints", 2)
    assert going_on(tmp_path, "rl") == ["run.resume=latest"]
