"""The trace files: append-only, indexed, annotated at ship."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from orchestrator_fakes import FakeTask, build_sample, inline, make_episode, run_virtual

from prl.orchestrator.episodes import Group
from prl.orchestrator.mixing import Draw
from prl.orchestrator.sink import Entry
from prl.orchestrator.traces import FLUSH_SECONDS, TraceLog
from prl.records import Episode, PolicySpan


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(tmp_path: Path, *episodes: Episode, attempt: int = 1, step: int = 1) -> TraceLog:
    async def scenario() -> TraceLog:
        log = TraceLog(tmp_path, attempt, offload=inline)
        for episode in episodes:
            log.add(episode, step)
        await log.flush()
        return log

    return run_virtual(scenario())


def episode(reward: float | None = 0.5, **kwargs: Any) -> Episode:
    made = make_episode("a0", reward, **kwargs)
    made.policy = PolicySpan(2, 3)
    made.started_at, made.finished_at = 100.0, 102.5
    made.traces[0].rewards = {"format": 1.0, "exact": None}
    return made


def test_an_episode_is_written_whole(tmp_path: Path) -> None:
    one = episode()
    written(tmp_path, one, step=4).close()
    (row,) = read(tmp_path / "stream.jsonl")
    assert (row["id"], row["env"], row["task_key"], row["step"]) == (one.id, "a", "a0", 4)
    assert row["policy"] == [2, 3]
    (trace,) = row["traces"]
    assert trace["reward"] == 0.5 and trace["rewards"] == {"format": 1.0, "exact": None}
    prompt, completion = trace["nodes"]
    assert prompt["token_ids"] == [5, 6] and prompt["mask"] == 0 and prompt["logprobs"] == []
    assert completion["token_ids"] == [10, 11, 12] and completion["mask"] == 1
    assert completion["logprobs"] == [-0.5] * 3 and trace["branches"] == [[0, 1]]


def test_a_mixed_mask_is_kept_token_by_token(tmp_path: Path) -> None:
    one = episode()
    one.traces[0].nodes[1].mask = [False, True, True]
    written(tmp_path, one).close()
    assert read(tmp_path / "stream.jsonl")[0]["traces"][0]["nodes"][1]["mask"] == [0, 1, 1]


def test_the_index_points_into_the_stream(tmp_path: Path) -> None:
    episodes = [episode(0.1), episode(None, error="Boom"), episode(0.3)]
    written(tmp_path, *episodes).close()
    data = (tmp_path / "stream.jsonl").read_bytes()
    for made, row in zip(episodes, read(tmp_path / "index.jsonl"), strict=True):
        assert json.loads(data[row["offset"] : row["offset"] + row["length"]])["id"] == made.id == row["id"]
    assert [row["rewards"] for row in read(tmp_path / "index.jsonl")] == [[0.1], [None], [0.3]]
    assert [row["errors"] for row in read(tmp_path / "index.jsonl")] == [[], ["Boom"], []]
    assert read(tmp_path / "index.jsonl")[0]["seconds"] == 2.5


def test_a_second_attempt_appends_and_its_index_is_right(tmp_path: Path) -> None:
    written(tmp_path, episode()).close()
    with (tmp_path / "stream.jsonl").open("ab") as file:
        file.write(b'{"torn": ')
    again = episode(0.9)
    written(tmp_path, again, attempt=2).close()
    row = read(tmp_path / "index.jsonl")[1]
    data = (tmp_path / "stream.jsonl").read_bytes()
    assert json.loads(data[row["offset"] : row["offset"] + row["length"]])["id"] == again.id
    assert [row["attempt"] for row in read(tmp_path / "index.jsonl")] == [1, 2]


def test_broken_numbers_do_not_break_the_file(tmp_path: Path) -> None:
    one = episode(math.nan)
    one.task = {"x": math.inf, "path": Path("/a")}
    written(tmp_path, one).close()
    (row,) = [
        json.loads(line, parse_constant=None) for line in (tmp_path / "stream.jsonl").read_text().splitlines()
    ]
    assert row["traces"][0]["reward"] == "nan" and row["task"] == {"x": "inf", "path": "/a"}


def test_arrivals_are_on_disk_shortly_after(tmp_path: Path) -> None:
    import asyncio

    async def scenario() -> int:
        log = TraceLog(tmp_path, 1, offload=inline)
        task = asyncio.create_task(log.run())
        log.add(episode(), 1)
        await asyncio.sleep(FLUSH_SECONDS * 1.5)
        task.cancel()
        return len(read(tmp_path / "stream.jsonl"))

    assert run_virtual(scenario()) == 1


def test_shipped_traces_are_annotated_with_step_and_advantages(tmp_path: Path) -> None:
    one = episode()
    trace = one.traces[0]
    trace.nodes[0].advantages, trace.nodes[1].advantages = [], [0.25, 0.25, 0.25]
    two = episode()
    two.traces[0].nodes[1].advantages = [0.5, -0.5, 0.0]
    group = Group("1-0", Draw(0, "a", FakeTask("a0")), 2, 0)
    shipped = [Entry(group, e, e.traces[0], build_sample("a", e.traces[0])) for e in (one, two)]

    async def scenario() -> None:
        log = TraceLog(tmp_path, 1, offload=inline)
        log.add(one, 7)
        await log.annotate(shipped, 7)
        log.close()

    run_virtual(scenario())
    first, second = read(tmp_path / "annotations.jsonl")
    assert (first["episode"], first["trace"], first["step"]) == (one.id, trace.id, 7)
    assert first["advantage"] == 0.25 and first["advantages"] == [[], 0.25]
    assert second["advantage"] == 0.0 and second["advantages"] == [None, [0.5, -0.5, 0.0]]
    assert len(read(tmp_path / "stream.jsonl")) == 1, "what is annotated is in the stream already"


def test_evaluations_are_told_from_training(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = TraceLog(tmp_path, 1, offload=inline)
        log.add(episode(), 3)
        log.add(episode(), 2, kind="eval")
        await log.flush()
        log.close()

    run_virtual(scenario())
    for name in ("stream", "index"):
        rows = [(row["kind"], row["step"]) for row in read(tmp_path / f"{name}.jsonl")]
        assert rows == [("train", 3), ("eval", 2)]
