"""Append-only JSON lines and the metric stream on top."""

from __future__ import annotations

import json
import math
from pathlib import Path

from prl.tracking.stream import JsonLines, MetricStream


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_append_is_one_line_at_the_place_it_says(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "x.jsonl"
    lines = JsonLines(path)
    places = lines.append({"a": 1}, {"text": "two\nlines, ü"})
    places += lines.append([3])
    lines.close()
    data = path.read_bytes()
    found = [json.loads(data[offset : offset + length]) for offset, length in places]
    assert found == [{"a": 1}, {"text": "two\nlines, ü"}, [3]]
    assert data.count(b"\n") == 3


def test_a_later_writer_appends_and_closes_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n{"b": ')
    lines = JsonLines(path)
    ((offset, length),) = lines.append({"c": 3})
    lines.close()
    raw = path.read_bytes()
    assert raw.splitlines() == [b'{"a": 1}', b'{"b": ', b'{"c": 3}']
    assert json.loads(raw[offset : offset + length]) == {"c": 3}


def test_a_whole_file_is_not_given_an_empty_line(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    for number in range(2):
        lines = JsonLines(path)
        lines.append({"n": number})
        lines.close()
    assert path.read_text() == '{"n": 0}\n{"n": 1}\n'


def test_what_json_cannot_say_becomes_text(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "x.jsonl")
    lines.append({"reward": math.nan, "deep": [(1, -math.inf)], "path": Path("/a"), 5: True, "none": None})
    lines.close()
    strict = json.loads((tmp_path / "x.jsonl").read_text(), parse_constant=lambda name: 1 / 0)
    assert strict == {"reward": "nan", "deep": [[1, "-inf"]], "path": "/a", "5": True, "none": None}


def test_metrics_carry_producer_step_and_time(tmp_path: Path) -> None:
    stream = MetricStream(tmp_path / "trainer.jsonl", "trainer")
    stream.log({"loss/mean": 0.25, "n": 3}, step=7)
    stream.log({"lag": 1.5})
    stream.close()
    first, second = read(tmp_path / "trainer.jsonl")
    assert first.pop("time") > 1e9 and second.pop("time") > 1e9
    assert first == {"producer": "trainer", "step": 7, "loss/mean": 0.25, "n": 3}
    assert second == {"producer": "trainer", "step": None, "lag": 1.5}


def test_metrics_drop_what_is_no_finite_number(tmp_path: Path) -> None:
    stream = MetricStream(tmp_path / "m.jsonl", "x")
    stream.log({"a": math.nan, "b": math.inf, "c": None, "d": 0.0, "e": -math.inf}, step=1)
    stream.close()
    (row,) = read(tmp_path / "m.jsonl")
    assert set(row) == {"producer", "step", "time", "d"} and row["d"] == 0.0


def test_numbers_of_other_kinds_become_plain_ones(tmp_path: Path) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 2.5

    stream = MetricStream(tmp_path / "m.jsonl", "x")
    stream.log({"scalar": Scalar(), "flag": True}, step=1)
    stream.close()
    (row,) = read(tmp_path / "m.jsonl")
    assert row["scalar"] == 2.5 and row["flag"] == 1


def test_a_line_is_there_at_once(tmp_path: Path) -> None:
    stream = MetricStream(tmp_path / "m.jsonl", "x")
    stream.log({"a": 1.0}, step=1)
    assert len(read(tmp_path / "m.jsonl")) == 1
    stream.close()
