from __future__ import annotations

import json
from pathlib import Path

import pytest
from tracking_lab import append_episodes, episode, node

from prl.tracking.mlflow_traces import TEXT_LENGTH, cut, messages_before, table_of, tags_of
from prl.tracking.trace_sample import ENDLESS_STRIDE, SampleState, TraceSample


def sample(path: Path, per_step: int = 1, most: int = 100, max_steps: int | None = 30) -> TraceSample:
    return TraceSample(path, per_step, most, max_steps)


def steps_of(records: list[dict]) -> list[int]:
    return [record["step"] for record in records]


def test_a_step_is_handed_out_when_the_next_one_begins(tmp_path: Path) -> None:
    found = sample(tmp_path)
    assert found.read() == [], "there is no index yet"
    append_episodes(tmp_path, episode("a", 1), episode("b", 1))
    assert found.read() == []
    append_episodes(tmp_path, episode("c", 2))
    (record,) = found.read()
    assert (
        record["id"] in ("a", "b") and record["traces"][0]["nodes"][3]["content"] == f"answer {record['id']}"
    )
    assert found.read() == [] and [r["id"] for r in found.read(closing=True)] == ["c"]


def test_the_choice_within_a_step_is_fair_and_repeats(tmp_path: Path) -> None:
    names = [f"e{number}" for number in range(200)]
    append_episodes(tmp_path, *(episode(name, 1) for name in names))
    first = [record["id"] for record in sample(tmp_path, per_step=40).read(closing=True)]
    assert len(set(first)) == 40
    assert first == [record["id"] for record in sample(tmp_path, per_step=40).read(closing=True)]
    late = sum(names.index(name) >= 100 for name in first)
    assert 10 <= late <= 30, "neither the first ones nor the last ones only"


def test_the_allowance_lasts_to_the_end(tmp_path: Path) -> None:
    append_episodes(tmp_path, *(episode(f"e{step}", step) for step in range(1, 101)))
    found = sample(tmp_path, most=10, max_steps=100)
    assert found.stride == 10
    records = found.read(closing=True)
    assert steps_of(records) == [1, *range(10, 100, 10)] and found.state.sent == 10
    assert found.read(closing=True) == [], "not one more than allowed"


def test_a_run_without_an_end_is_sampled_now_and_then(tmp_path: Path) -> None:
    append_episodes(tmp_path, *(episode(f"e{step}", step) for step in range(1, 32)))
    records = sample(tmp_path, max_steps=None).read(closing=True)
    assert steps_of(records) == [1, ENDLESS_STRIDE, 2 * ENDLESS_STRIDE, 3 * ENDLESS_STRIDE]


@pytest.mark.parametrize(("per_step", "most"), [(0, 100), (1, 0)])
def test_none_means_that_nothing_is_read(tmp_path: Path, per_step: int, most: int) -> None:
    append_episodes(tmp_path, episode("a", 1))
    found = sample(tmp_path, per_step, most)
    assert found.read(closing=True) == [] and found.state.offset == 0


def test_a_later_attempt_goes_on_where_the_index_was_left(tmp_path: Path) -> None:
    append_episodes(tmp_path, episode("a", 1), episode("b", 2))
    first = sample(tmp_path)
    assert len(first.read(closing=True)) == 2
    append_episodes(tmp_path, episode("c", 2))
    again = TraceSample(tmp_path, 1, 100, 30, SampleState(first.state.offset, first.state.sent))
    assert [record["id"] for record in again.read(closing=True)] == ["c"] and again.state.sent == 3


def test_a_torn_line_of_the_index_is_left_out(tmp_path: Path) -> None:
    append_episodes(tmp_path, episode("a", 1))
    with (tmp_path / "index.jsonl").open("a") as index:
        index.write('{"id": "torn\n{"id": "unfinished"')
    assert [record["id"] for record in sample(tmp_path).read(closing=True)] == ["a"]


def test_messages_follow_the_branch_of_each_reply() -> None:
    nodes = [
        node(None, "user", "a"),
        node(0, "assistant", "b"),
        node(1, "user", "c"),
        node(2, "assistant", "d"),
        node(0, "assistant", "other"),
    ]
    found = [[m["content"] for m in messages_before(nodes, nodes[place])] for place in (1, 3, 4)]
    assert found == [["a"], ["a", "b", "c"], ["a"]]


def test_tags_link_an_episode_to_the_step_of_its_metrics() -> None:
    tags = tags_of(episode("a", 3))
    assert tags["step"] == "3" and tags["group"] == "g3" and tags["env"] == "toy"
    assert (tags["policy_version"], tags["policy_version_end"]) == ("2", "3")
    assert "policy_version" not in tags_of({**episode("a", 3), "policy": None}), "a frozen model has none"


def test_texts_are_bounded() -> None:
    assert cut("short") == "short" and cut(None) is None
    assert cut("x" * (TEXT_LENGTH + 5)).endswith("… (5 more characters)")


def test_the_table_has_a_row_a_trace() -> None:
    failed = episode("b", 2, reward=None, error={"type": "RolloutTimeout", "message": ""})
    table = table_of([episode("a", 1), failed])
    assert table["reward"] == [0.5, None] and table["error"] == [None, "RolloutTimeout"]
    assert table["prompt"] == ["question a", "question b"] and table["reply"][0] == "answer a"
    assert table["turns"] == [2, 2] and table["policy"] == ["[0, 1]", "[1, 2]"]
    assert json.dumps(table), "MLflow keeps it as JSON"
