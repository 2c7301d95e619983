from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_runs import Shape, write_run

from prl.dashboard.catalog import Run
from prl.dashboard.episode_index import COLUMNS, EpisodeIndex
from prl.dashboard.episode_query import Query, errors_by_type, group_of, histogram, in_flight, page

SHAPE = Shape(episodes=240, batch_size=40, group_size=8, error_rate=0.1, truncated_rate=0.2)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("episodes") / "run", SHAPE)


def opened(path: Path, refresh: bool = True) -> EpisodeIndex:
    index = EpisodeIndex(Run("id", path.resolve(), path.resolve()))
    while refresh and (index.refresh(), index.share_read < 1)[1]:
        pass
    return index


def copy(path: Path, target: Path) -> Path:
    (target / "traces").mkdir(parents=True)
    for file in (path / "traces").iterdir():
        (target / "traces" / file.name).write_bytes(file.read_bytes())
    return target


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / "traces" / "stream.jsonl").read_text().splitlines()]


def ids(told: dict[str, Any]) -> list[str]:
    return [row["id"] for row in told["rows"]]


def same(one: EpisodeIndex, other: EpisodeIndex) -> bool:
    columns = [name for name in COLUMNS if name != "index_offset"]
    return all(
        np.array_equal(one.columns[c], other.columns[c], equal_nan=COLUMNS[c] == np.float64) for c in columns
    )


def test_every_row_leads_to_its_episode(path: Path) -> None:
    index = opened(path)
    expected = records(path)
    assert len(index) == SHAPE.episodes
    for number in (0, 1, 119, 239):
        assert index.record(number) == expected[number]
        assert index.summary(number)["id"] == expected[number]["id"]
    with pytest.raises(IndexError):
        index.record(240)
    with pytest.raises(IndexError):
        index.summary(-1)


def test_without_an_index_the_stream_is_scanned_and_says_the_same(path: Path, tmp_path: Path) -> None:
    bare = copy(path, tmp_path / "bare")
    (bare / "traces" / "index.jsonl").unlink()
    scanned, indexed = opened(bare), opened(path)
    assert same(scanned, indexed)
    assert scanned.columns["index_offset"].tolist() == [-1] * SHAPE.episodes
    shown, expected = scanned.summary(17), indexed.summary(17)
    assert shown == {**expected, "seconds": pytest.approx(expected["seconds"])}
    assert not (bare / "traces" / "index.jsonl").exists()


def test_what_a_stale_index_lacks_is_scanned(path: Path, tmp_path: Path) -> None:
    stale = copy(path, tmp_path / "stale")
    lines = (stale / "traces" / "index.jsonl").read_text().splitlines(keepends=True)
    (stale / "traces" / "index.jsonl").write_text("".join(lines[:100]) + lines[100][:50])
    index = opened(stale)
    assert same(index, opened(path))
    assert (index.columns["index_offset"] >= 0).sum() == 100


def test_an_index_of_another_stream_is_not_believed(path: Path, tmp_path: Path) -> None:
    wrong = copy(path, tmp_path / "wrong")
    lines = [json.loads(line) for line in (wrong / "traces" / "index.jsonl").read_text().splitlines()]
    text = "".join(json.dumps({**line, "offset": line["offset"] + 7}) + "\n" for line in lines)
    (wrong / "traces" / "index.jsonl").write_text(text)
    assert same(opened(wrong), opened(path))


def test_a_growing_run_is_followed_whichever_file_comes_first(path: Path, tmp_path: Path) -> None:
    whole = {
        name: (path / "traces" / f"{name}.jsonl").read_bytes().splitlines(True)
        for name in ("stream", "index")
    }
    live = tmp_path / "live"
    (live / "traces").mkdir(parents=True)
    index = opened(live)
    assert len(index) == 0
    for stream, places in ((50, 40), (60, 60), (60, 60), (240, 200), (240, 240)):
        with (live / "traces" / "stream.jsonl").open("wb") as file:
            file.write(b"".join(whole["stream"][:stream]))
        with (live / "traces" / "index.jsonl").open("wb") as file:
            file.write(b"".join(whole["index"][:places]))
        index.refresh()
        assert index.columns["offset"].tolist() == sorted(set(index.columns["offset"].tolist()))
        assert len(index) == stream
    assert same(index, opened(path))


def test_a_line_that_a_crash_tore_is_left_out(path: Path, tmp_path: Path) -> None:
    torn = copy(path, tmp_path / "torn")
    lines = (torn / "traces" / "stream.jsonl").read_bytes().splitlines(True)
    (torn / "traces" / "stream.jsonl").write_bytes(b"".join([*lines[:3], lines[3][:90] + b"\n", lines[4]]))
    (torn / "traces" / "index.jsonl").unlink()
    index = opened(torn)
    assert [index.record(i)["id"] for i in range(len(index))] == ["e0", "e1", "e2", "e4"]


def test_another_run_in_the_same_directory_starts_over(path: Path, tmp_path: Path) -> None:
    place = copy(path, tmp_path / "reused")
    index = opened(place)
    for file in list((place / "traces").iterdir()):
        file.unlink()
    index.refresh()
    assert len(index) == 0
    write_run(place, Shape(episodes=16, seed=3))
    index.refresh()
    assert len(index) == 16


def test_reading_goes_on_where_the_time_was_up(path: Path, tmp_path: Path) -> None:
    big = write_run(tmp_path / "big", Shape(episodes=20_000, batch_size=500))
    index = opened(big, refresh=False)
    sizes = []
    while not sizes or index.share_read < 1:
        index.refresh(seconds=0.0)
        sizes.append(len(index))
    assert len(sizes) > 2 and sizes == sorted(sizes) and sizes[-1] == 20_000


FILTERS: list[tuple[Query, Any]] = [
    (Query(step_from=2, step_to=3), lambda e, t: 2 <= e["step"] <= 3),
    (Query(env="arithmetic"), lambda e, t: e["env"] == "arithmetic"),
    (Query(env="unknown"), lambda e, t: False),
    (Query(reward_from=0.5), lambda e, t: t["reward"] is not None and t["reward"] >= 0.5),
    (
        Query(reward_from=0.2, reward_to=0.4),
        lambda e, t: t["reward"] is not None and 0.2 <= t["reward"] <= 0.4,
    ),
    (Query(truncated=True), lambda e, t: t["is_truncated"]),
    (Query(truncated=False), lambda e, t: not t["is_truncated"]),
    (Query(error="any"), lambda e, t: t["error"] is not None),
    (Query(error="none"), lambda e, t: t["error"] is None),
    (Query(error="ToolError"), lambda e, t: t["error"] is not None and t["error"]["type"] == "ToolError"),
    (Query(attempt=2), lambda e, t: False),
    (
        Query(step_to=4, env="reverse_text", error="none", reward_from=0.3),
        lambda e, t: e["step"] <= 4 and e["env"] == "reverse_text" and (t["reward"] or 0) >= 0.3,
    ),
]


@pytest.mark.parametrize(("query", "wanted"), FILTERS)
def test_filters_choose_what_a_look_at_every_episode_chooses(path: Path, query: Query, wanted: Any) -> None:
    index = opened(path)
    expected = [e["id"] for e in records(path) if wanted(e, e["traces"][0])][::-1]
    told = page(index, query)
    assert told["total"] == len(expected)
    assert ids(told) == expected[: query.limit]


def test_pages_cover_the_selection_once(path: Path) -> None:
    index = opened(path)
    found = [row for start in range(0, 240, 50) for row in ids(page(index, Query(start=start)))]
    assert found == [f"e{n}" for n in range(239, -1, -1)]
    assert page(index, Query(start=1000))["rows"] == []


@pytest.mark.parametrize("descending", [True, False])
def test_sorting_by_reward_puts_missing_ones_last(path: Path, descending: bool) -> None:
    told = page(opened(path), Query(sort="reward", descending=descending, limit=200))
    rewards = [row["rewards"][0] for row in told["rows"]]
    given = [reward for reward in rewards if reward is not None]
    assert given == sorted(given, reverse=descending)
    failed = sum(e["traces"][0]["error"] is not None for e in records(path))
    assert rewards[: 240 - failed][:200] == given


def test_the_selection_is_described(path: Path) -> None:
    told = page(opened(path), Query(env="arithmetic"))
    own = [e["traces"][0] for e in records(path) if e["env"] == "arithmetic"]
    assert told["of"] == 240 and told["steps"] == [1, 6] and told["attempts"] == [1]
    assert told["failed"] == sum(t["error"] is not None for t in own)
    assert told["truncated"] == sum(t["is_truncated"] for t in own)
    assert sum(told["histogram"]["counts"]) + told["histogram"]["missing"] == len(own)


def test_a_histogram_of_equal_and_of_no_rewards() -> None:
    assert sum(histogram(np.array([0.5, 0.5, np.nan]))["counts"]) == 2  # type: ignore[index]
    assert histogram(np.array([np.nan])) is None


def test_a_group_is_its_members_best_first(path: Path) -> None:
    members = group_of(opened(path), 21)
    expected = sorted(range(16, 24), key=lambda n: (-(_reward(path, n)), n))
    assert [row["row"] for row in members] == expected
    with pytest.raises(IndexError):
        group_of(opened(path), 999)


def _reward(path: Path, number: int) -> float:
    reward = records(path)[number]["traces"][0]["reward"]
    return -math.inf if reward is None else reward


def test_groups_of_the_same_name_in_two_attempts_are_two(path: Path, tmp_path: Path) -> None:
    resumed = copy(path, tmp_path / "resumed")
    lines = [{**json.loads(line), "attempt": 2} for line in (path / "traces" / "stream.jsonl").open()]
    with (resumed / "traces" / "stream.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    index = opened(resumed)
    assert len(index) == 480
    assert {row["row"] for row in group_of(index, 0)} == set(range(8))
    assert page(index, Query(attempt=2))["total"] == 240


def test_errors_are_counted_by_type_step_and_environment(path: Path) -> None:
    told = errors_by_type(opened(path))
    failed = [e for e in records(path) if e["traces"][0]["error"]]
    assert sum(kind["count"] for kind in told["types"]) == len(failed)
    for kind in told["types"]:
        own = [e for e in failed if e["traces"][0]["error"]["type"] == kind["type"]]
        assert kind["count"] == len(own) == sum(kind["by_step"]) == sum(kind["envs"].values())
        assert (kind["first_step"], kind["last_step"]) == (own[0]["step"], own[-1]["step"])
        assert kind["example"] == int(own[-1]["id"][1:])
    assert [kind["count"] for kind in told["types"]] == sorted(
        (k["count"] for k in told["types"]), reverse=True
    )


def test_rollouts_in_flight_are_counted_at_each_moment(path: Path) -> None:
    episodes = records(path)
    since = min(e["started_at"] for e in episodes) - 1
    until = max(e["finished_at"] for e in episodes) + 1
    told = in_flight(opened(path), since, until, bins=50)
    for at, count in zip(np.linspace(since, until, 50), told["y"], strict=True):
        assert count == sum(e["started_at"] <= at < e["finished_at"] for e in episodes)


def test_a_run_without_traces_answers_every_question(tmp_path: Path) -> None:
    index = opened(tmp_path)
    assert page(index, Query())["total"] == 0
    assert errors_by_type(index)["types"] == []
    assert in_flight(index, 0.0, 1.0, bins=3)["y"] == [0, 0, 0]
