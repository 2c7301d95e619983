from __future__ import annotations

import json
from pathlib import Path

import pytest

from prl.tracking.reader import (
    MetricTails,
    Record,
    StreamTail,
    append_attempt_marker,
    drop_superseded,
    read_metrics,
)
from prl.tracking.stream import MetricStream


def line(step: int | None, time: float = 0.0, producer: str = "trainer", **values: float) -> str:
    return json.dumps({"producer": producer, "step": step, "time": time, **values}) + "\n"


def steps(records: list[Record]) -> list[int | None]:
    return [record.step for record in records if record.resumed_from is None]


def test_a_tail_gives_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    tail = StreamTail(path)
    assert tail.read() == [], "the file may come later"
    path.write_text(line(1, 5.0, loss=0.5) + line(2)[:-7])
    assert tail.read() == [Record("trainer", 1, 5.0, {"loss": 0.5})]
    assert tail.read() == [], "the second line is not complete"
    with path.open("a") as file:
        file.write(line(2)[-7:] + line(3))
    assert steps(tail.read()) == [2, 3] and tail.offset == path.stat().st_size


def test_a_tail_starts_where_another_ended(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_text(line(1) + line(2))
    first = StreamTail(path)
    first.read()
    with path.open("a") as file:
        file.write(line(3))
    assert steps(StreamTail(path, first.offset).read()) == [3]


def test_reads_are_bounded_and_a_line_longer_than_the_bound_still_passes(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_text(line(1, **{f"key{n}": 1.0 for n in range(500)}) + line(2) + line(3))
    tail = StreamTail(path)
    chunks = []
    while chunk := tail.read(limit=64):
        chunks.append(steps(chunk))
    assert chunks[0][0] == 1 and [step for chunk in chunks for step in chunk] == [1, 2, 3]


def test_torn_and_foreign_lines_spoil_themselves_only(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    path.write_bytes(line(1).encode() + b'{"step": 2, "lo\n[1, 2]\n\xff\xfe\n\n' + line(3).encode())
    assert steps(StreamTail(path).read()) == [1, 3]


def test_only_numbers_are_values(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"step": 1, "time": 2, "a": 1, "b": None, "c": "text", "d": True}) + "\n")
    assert StreamTail(path).read() == [Record("x", 1, 2.0, {"a": 1.0, "d": 1.0})]


def test_streams_are_merged_by_time_and_new_ones_are_found(tmp_path: Path) -> None:
    (tmp_path / "trainer.jsonl").write_text(line(1, 2.0) + line(2, 4.0))
    tails = MetricTails(tmp_path)
    assert steps(tails.read()) == [1, 2]
    (tmp_path / "orchestrator.jsonl").write_text(line(3, 5.0) + line(4, 7.0))
    with (tmp_path / "trainer.jsonl").open("a") as file:
        file.write(line(5, 6.0))
    assert steps(tails.read()) == [3, 5, 4]
    assert tails.offsets == {path.name: path.stat().st_size for path in tmp_path.iterdir()}


def test_offsets_survive_for_streams_that_were_not_opened_yet(tmp_path: Path) -> None:
    assert MetricTails(tmp_path, {"trainer.jsonl": 7}).offsets == {"trainer.jsonl": 7}


def test_a_marker_makes_later_steps_above_it_void(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    stream = MetricStream(path, "trainer")
    for step in (1, 2, 3, 4):
        stream.log({"loss/mean": float(step)}, step)
    stream.log({"time/axis": 1.0})
    stream.close()
    with path.open("a") as file:
        file.write('{"producer": "trainer", "step": 5, "time":')
    append_attempt_marker(path, attempt=2, resumed_from=2)
    stream = MetricStream(path, "trainer")
    stream.log({"loss/mean": 30.0}, 3)
    stream.close()
    records = read_metrics(tmp_path)
    assert [(r.step, r.values) for r in records if r.resumed_from is None] == [
        (1, {"loss/mean": 1.0}),
        (2, {"loss/mean": 2.0}),
        (None, {"time/axis": 1.0}),
        (3, {"loss/mean": 30.0}),
    ]
    assert [(r.producer, r.attempt, r.resumed_from) for r in records if r.values == {}] == [
        ("launcher", 2, 2)
    ]


def test_markers_add_up() -> None:
    stream = [Record("t", step, 0.0) for step in (1, 2, 3)]
    stream += [
        Record("launcher", None, 0.0, attempt=2, resumed_from=2),
        Record("t", 3, 1.0),
        Record("t", 4, 1.0),
    ]
    stream += [Record("launcher", None, 0.0, attempt=3, resumed_from=0), Record("t", 1, 2.0)]
    kept = drop_superseded(stream)
    assert [(r.step, r.time) for r in kept if r.resumed_from is None] == [(1, 2.0)]


def test_a_marker_is_valid_json_with_the_head_of_every_line(tmp_path: Path) -> None:
    path = tmp_path / "trainer.jsonl"
    append_attempt_marker(path, 2, 5)
    fields = json.loads(path.read_text())
    assert {key: fields[key] for key in ("producer", "step", "attempt", "resumed_from")} == {
        "producer": "launcher",
        "step": None,
        "attempt": 2,
        "resumed_from": 5,
    }
    assert fields["time"] == pytest.approx(path.stat().st_mtime, abs=5)
