"""Numbers say what was measured: errors are beside the means, never silently in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from evals_lab import fill, make_config, make_run

from prl.evals.plan import Plan
from prl.evals.plot import BINS, figure, histogram, write_plot
from prl.evals.results import Results, collect, metrics, reward_tables, rows_of, write_results
from prl.evals.sources import Key
from prl.evals.tables import closing_lines, curve, markdown_table, notes, plain_table, report, table_rows


def keys(step: int = 0, env: str = "toy", tasks: str = "ab", rollouts: int = 2) -> list[Key]:
    return [Key(step, env, task, rollout) for task in tasks for rollout in range(rollouts)]


def measured(tmp_path: Path, entries: list[tuple[Key, Any]], **fields: Any) -> Results:
    fill(make_run(tmp_path), entries)
    results = collect(make_config(**fields), make_run(tmp_path))
    assert results is not None
    return results


def test_scores_by_hand(tmp_path: Path) -> None:
    results = measured(tmp_path, list(zip(keys(), [1.0, 0.0, 1.0, 1.0], strict=True)))
    (score,) = results.scores
    found = score.agents["agent"]
    assert (score.tasks, score.expected, score.finished, score.failed, score.missing) == (2, 4, 4, 0, 0)
    assert found.avg.mean == 0.75 and found.avg.tasks == 2
    assert {k: e.mean for k, e in found.pass_at.items()} == {1: 0.75, 2: 1.0}
    assert {k: e.mean for k, e in found.pass_hat.items()} == {1: 0.75, 2: 0.5}
    assert found.metrics == {"exact": 0.75} and found.turns == 1.0 and results.complete


def test_errors_enter_no_mean_unless_asked(tmp_path: Path) -> None:
    entries = list(zip(keys(), [1.0, None, 1.0, 1.0], strict=True))
    skipped = measured(tmp_path / "s", entries).scores[0]
    zero = measured(tmp_path / "z", entries, rules={"errors": "zero"}).scores[0]
    assert skipped.agents["agent"].avg.mean == 1.0 and zero.agents["agent"].avg.mean == 0.75
    assert skipped.errors == zero.errors == {"ProviderError": 1}
    assert skipped.agents["agent"].pass_at[2].tasks == 1, "task a has one rollout left"
    assert zero.agents["agent"].rewards["a"] == [1.0, 0.0]


def test_nothing_measured_is_no_number(tmp_path: Path) -> None:
    results = measured(tmp_path, [(key, None) for key in keys()])
    assert results.scores[0].agents == {} and results.scores[0].failed == 4
    assert "not measured" in plain_table(table_rows(results))
    assert list(closing_lines(results.scores[0])) == [
        "Evaluated toy: nothing was measured, 4 rollouts, 4 errors"
    ]
    assert not any("avg" in name for name in metrics(results.scores[0]))


def test_rollouts_outside_the_plan_do_not_count(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, list(zip(keys(), [1.0, 0.0, 1.0, 1.0], strict=True)))
    Plan({"toy": 1}, {"toy": ["a"]}, [0]).write(run)
    results = collect(make_config(), run)
    assert (
        results is not None
        and results.scores[0].finished == 1
        and results.scores[0].agents["agent"].avg.mean == 1.0
    )


def test_missing_rollouts_are_told(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, list(zip(keys(), [1.0, 0.0, 1.0, None], strict=True)))
    Plan({"toy": 3}, {"toy": ["a", "b"]}, [0]).write(run)
    results = collect(make_config(), run)
    assert results is not None and not results.complete and results.scores[0].missing == 2
    assert list(notes(results)) == [
        "toy: 1 of 4 rollouts failed (1 ProviderError), left out of every mean",
        "toy: 2 of 6 rollouts are missing",
    ]
    assert "4 of 6" in plain_table(table_rows(results))


def test_agents_have_scores_of_their_own(tmp_path: Path) -> None:
    rewards = [{"left": 1.0, "right": -1.0}, {"left": -1.0, "right": 1.0}]
    results = measured(tmp_path, list(zip(keys(tasks="a"), rewards, strict=True)))
    assert {a: s.avg.mean for a, s in results.scores[0].agents.items()} == {"left": 0.0, "right": 0.0}
    assert results.scores[0].agents["left"].pass_at == {}, "-1 is not 0"


def test_an_error_counts_as_zero_for_every_agent(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(Key(0, "toy", "a", 0), {"left": 1.0, "right": 0.5}), (Key(0, "toy", "a", 1), None)])
    tables = reward_tables(rows_of(run, None).values(), zero_errors=True)
    assert tables == {"left": {"a": [1.0, 0.0]}, "right": {"a": [0.5, 0.0]}}


def test_metric_names(tmp_path: Path) -> None:
    results = measured(tmp_path, list(zip(keys(), [1.0, 0.0, None, 1.0], strict=True)))
    values = metrics(results.scores[0])
    assert values["eval/toy/effective/agent/avg@2"] == 0.75
    assert values["eval/toy/all/has_error/mean"] == 0.25
    assert {"eval/toy/effective/agent/pass@2", "eval/toy/effective/agent/pass^1"} <= values.keys()
    assert (
        values["eval/toy/effective/agent/avg@2/low"] <= 0.75 <= values["eval/toy/effective/agent/avg@2/high"]
    )
    assert values["eval/toy/effective/agent/metrics/exact/mean"] == pytest.approx(2 / 3)


def test_results_file_is_plain_numbers(tmp_path: Path) -> None:
    results = measured(tmp_path, list(zip(keys(), [1.0, 0.0, None, 1.0], strict=True)))
    write_results(results, make_run(tmp_path))
    tree = json.loads((tmp_path / "results.json").read_text())
    (score,) = tree["scores"]
    assert tree["complete"] is True and tree["model"] == "chat" and tree["errors"] == "skip"
    assert score["failed"] == 1 and score["errors"] == {"ProviderError": 1}
    assert score["agents"]["agent"]["avg"]["mean"] == 0.75 and "rewards" not in score["agents"]["agent"]


def test_before_the_plan_there_are_no_results(tmp_path: Path) -> None:
    assert collect(make_config(), make_run(tmp_path)) is None


def test_a_curve_over_checkpoints(tmp_path: Path) -> None:
    entries = [
        (key, reward) for step, reward in ((10, 0.0), (20, 1.0)) for key in keys(step) for reward in [reward]
    ]
    results = measured(tmp_path, entries)
    assert curve(results) == ["toy/agent  ▁█  10:0.000 20:1.000"]
    assert table_rows(results)[0][0] == "step" and "Over the checkpoints" in report(results)
    assert rows_of(make_run(tmp_path), 10).keys() == set(keys(10))
    assert rows_of(make_run(tmp_path), None).keys() == set(keys(20)), "the last, if not told"
    single = measured(tmp_path / "one", [(key, 1.0) for key in keys()])
    assert curve(single) == []


def test_tables_are_aligned_and_markdown(tmp_path: Path) -> None:
    rows = [["env", "n"], ["long name", "1"], ["x", "100"]]
    assert plain_table(rows).splitlines() == ["env          n", "long name    1", "x          100"]
    assert markdown_table(rows).splitlines()[1] == "| --- | --- |"
    results = measured(tmp_path, list(zip(keys(), [1.0, 0.0, 1.0, 1.0], strict=True)))
    text = report(results)
    assert "| toy | agent | 2 | 4 | 0 | 0.750 [" in text and "pass@2" in text and "pass^2" in text


def test_histograms_hold_every_reward() -> None:
    counts = histogram([0.0, 0.04, 0.5, 1.0, 1.0], 0.0, 1.0)
    assert len(counts) == BINS and sum(counts) == 5
    assert (counts[0], counts[BINS // 2], counts[-1]) == (2, 1, 2)


def test_plots_are_svg(tmp_path: Path) -> None:
    import xml.etree.ElementTree as xml

    root = xml.fromstring(figure([("a <b>", [0.0, 1.0]), ("c", [-3.0])]))
    assert root.tag.endswith("svg")
    results = measured(tmp_path, [(key, None) for key in keys()])
    write_plot(results, tmp_path / "none.svg")
    assert not (tmp_path / "none.svg").exists()
