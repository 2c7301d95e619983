"""Reading metric streams: tails of growing files, and what of them still holds after resumes.

A resume from step K makes the lines of later steps void: those steps are done again. The launcher then
appends an attempt marker to every stream,

    {"producer": "launcher", "step": null, "time": t, "attempt": n, "resumed_from": K}

and a reader drops the lines above it whose step is greater than K.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.tracking.stream import JsonLines

CHUNK_BYTES = 1 << 20
_HEAD = frozenset({"producer", "step", "time"})


@dataclass(slots=True)
class Record:
    """One line of a stream. `resumed_from` is set on attempt markers only, which have no values."""

    producer: str
    step: int | None
    time: float
    values: dict[str, float] = field(default_factory=dict)
    attempt: int | None = None
    resumed_from: int | None = None


class StreamTail:
    """Complete lines of one growing file, each once. `offset` is where the next read begins."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self.offset = offset

    def read(self, limit: int = CHUNK_BYTES) -> list[Record]:
        """New records, of about `limit` bytes of text. A line without its newline is left for the next time.

        Lines that are no JSON object (torn by a crash) are left out.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read(limit)
                while data and b"\n" not in data and (more := file.read(limit)):
                    data += more
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        records = (_parse(line, self.path.stem) for line in complete.splitlines())
        return [record for record in records if record is not None]


class MetricTails:
    """Tails of every stream in a directory; streams may appear later. `offsets`: where to start in each."""

    def __init__(self, directory: Path, offsets: dict[str, int] | None = None) -> None:
        self._directory = directory
        self._start = offsets or {}
        self._tails: dict[str, StreamTail] = {}

    @property
    def offsets(self) -> dict[str, int]:
        """File name -> bytes read of it."""
        return self._start | {name: tail.offset for name, tail in self._tails.items()}

    def read(self, limit: int = CHUNK_BYTES) -> list[Record]:
        """New records of all streams, in the order of their times; at most about `limit` bytes of each."""
        for path in sorted(self._directory.glob("*.jsonl")):
            if path.name not in self._tails:
                self._tails[path.name] = StreamTail(path, self._start.get(path.name, 0))
        records: list[Record] = []
        for tail in self._tails.values():
            records += drop_superseded(tail.read(limit))
        return sorted(records, key=lambda record: record.time)


def read_metrics(directory: Path) -> list[Record]:
    """All records that still hold, of all streams of `<run>/metrics`, in the order of their times."""
    records: list[Record] = []
    for path in sorted(directory.glob("*.jsonl")):
        tail, stream = StreamTail(path), []
        while chunk := tail.read():
            stream += chunk
        records += drop_superseded(stream)
    return sorted(records, key=lambda record: record.time)


def drop_superseded(stream: Iterable[Record]) -> list[Record]:
    """Records of one stream, in file order, without those that a later resume made void."""
    kept: list[Record] = []
    for record in stream:
        if (last := record.resumed_from) is not None:
            kept = [earlier for earlier in kept if earlier.step is None or earlier.step <= last]
        kept.append(record)
    return kept


def append_attempt_marker(path: Path, attempt: int, resumed_from: int) -> None:
    """Declare every line so far with a step above `resumed_from` void."""
    lines = JsonLines(path)
    head = {"producer": "launcher", "step": None, "time": time.time()}
    lines.append({**head, "attempt": attempt, "resumed_from": resumed_from})
    lines.close()


def _parse(line: bytes, stem: str) -> Record | None:
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    record = Record(str(fields.get("producer", stem)), fields.get("step"), float(fields.get("time", 0.0)))
    if "resumed_from" in fields:
        record.attempt, record.resumed_from = int(fields["attempt"]), int(fields["resumed_from"])
    else:
        record.values = _numbers(fields)
    return record


def _numbers(fields: dict[str, Any]) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in fields.items()
        if name not in _HEAD and isinstance(value, int | float)
    }
