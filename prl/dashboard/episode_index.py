"""Where every episode of a run is, and the columns by which a table of them is filtered and sorted.

The columns come from `traces/index.jsonl`; what the stream has and the index lacks (it was lost, is behind,
or speaks of another stream) is found by scanning the stream itself. Nothing of an episode's transcript is
kept: about 100 bytes a row, so that 10^5 episodes cost 10 MB and one read of the index.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from prl.dashboard.catalog import Run

CHUNK_BYTES = 1 << 21
COLUMNS = {
    "offset": np.int64,
    "length": np.int64,
    "step": np.int32,
    "attempt": np.int16,
    "env": np.int32,
    "error": np.int32,
    "group": np.int32,
    "reward": np.float64,
    "truncated": np.bool_,
    "turns": np.int32,
    "tokens": np.int64,
    "seconds": np.float64,
    "finished_at": np.float64,
    "version": np.int32,
    "index_offset": np.int64,
}
"""`env`, `error`, `group` are codes of `names`; `error` 0 is none; `version` -1 is a frozen model.
`index_offset` is -1 for a row that the index does not have."""


class Codes:
    """Small numbers for names that recur."""

    def __init__(self, *first: str) -> None:
        self.names = list(first)
        self._codes = {name: code for code, name in enumerate(first)}

    def of(self, name: str) -> int:
        code = self._codes.setdefault(name, len(self.names))
        if code == len(self.names):
            self.names.append(name)
        return code

    def find(self, name: str) -> int:
        """Its code, or -1 for a name that never occurred."""
        return self._codes.get(name, -1)


class EpisodeIndex:
    """Rows in the order of the stream; a row's number never changes while the stream only grows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self.envs, self.errors, self.groups = Codes(), Codes(""), Codes()
        self.columns = {name: np.empty(0, kind) for name, kind in COLUMNS.items()}
        self._index_read = 0
        self._stream_read = 0
        self._indexed_to = 0
        self._usable = True
        self._identity: tuple[int, int] | None = None
        self.total_bytes = 0

    @property
    def revision(self) -> int:
        """Changes when rows do."""
        return self._index_read + self._stream_read

    @property
    def share_read(self) -> float:
        """How much of what is there has been looked at, 0 to 1."""
        return min(1.0, self._stream_read / self.total_bytes) if self.total_bytes else 1.0

    def __len__(self) -> int:
        return len(self.columns["offset"])

    def refresh(self, seconds: float = 0.5) -> None:
        """Take in what is new, for at most about `seconds`; `share_read` is 1 when nothing is left."""
        with self._lock:
            stream = self._run.inside(self._run.path / "traces" / "stream.jsonl")
            if stream is None:
                return self._reset()
            told = stream.stat()
            identity = (told.st_dev, told.st_ino)
            if identity != self._identity or told.st_size < self._stream_read:
                self._reset()
                self._identity = identity
            self.total_bytes = told.st_size
            deadline = time.monotonic() + seconds
            if self._read_index(stream, deadline):
                self._scan(stream, deadline)

    def _read_index(self, stream: Path, deadline: float) -> bool:
        """Rows of new index lines; True when the index has no more to tell."""
        path = self._run.inside(self._run.path / "traces" / "index.jsonl")
        if path is None or not self._usable:
            return True
        if path.stat().st_size < self._index_read:
            self._usable = False
            return True
        with path.open("rb") as file, stream.open("rb") as lines:
            file.seek(self._index_read)
            while chunk := _whole_lines(file):
                rows = list(_index_rows(chunk, self._index_read))
                if rows and not self._fits(rows[-1], lines):
                    self._usable = False
                    return True
                self._take(rows)
                self._index_read += len(chunk)
                if time.monotonic() > deadline:
                    return False
        return True

    def _fits(self, row: dict[str, Any], stream: BinaryIO) -> bool:
        """Whether the stream really has this episode where the index says."""
        record = read_line(stream, row["offset"], row["length"])
        return record is not None and record.get("id") == row["id"]

    def _take(self, rows: list[dict[str, Any]]) -> None:
        """Add indexed rows; rows that a scan found earlier give way to them."""
        if not rows:
            return
        first = min(row["offset"] for row in rows)
        if first < self._stream_read:
            kept = self.columns["offset"] < first
            self.columns = {name: column[kept] for name, column in self.columns.items()}
        self._append(rows)
        self._indexed_to = max(row["offset"] + row["length"] + 1 for row in rows)
        self._stream_read = self._indexed_to

    def _scan(self, stream: Path, deadline: float) -> None:
        """Rows of what lies behind the last indexed line."""
        with stream.open("rb") as file:
            file.seek(self._stream_read)
            while chunk := _whole_lines(file):
                self._append(list(_stream_rows(chunk, self._stream_read)))
                self._stream_read += len(chunk)
                if time.monotonic() > deadline:
                    return
            if self._stream_read < self.total_bytes:  # a line that is being written, or was torn
                self.total_bytes = self._stream_read

    def _append(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            row["group"] = self.groups.of(f"{row['attempt']}/{row['env']}/{row['group']}")
            row["env"] = self.envs.of(str(row["env"]))
            row["error"] = self.errors.of(", ".join(sorted({str(name) for name in row["errors"]})))
            row["reward"] = mean_reward(row["rewards"])
            row["version"] = row["policy"][0] if row["policy"] else -1
        # A new table in one assignment: whoever reads the old one meanwhile sees columns of one length.
        self.columns = {
            name: np.concatenate([self.columns[name], np.array([row[name] for row in rows], kind)])
            for name, kind in COLUMNS.items()
        }

    def summary(self, number: int) -> dict[str, Any]:
        """Everything a row of the table shows. Raises IndexError, or LookupError if the files changed."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        offset = int(self.columns["index_offset"][number])
        if offset < 0:
            row = summarise(self.record(number), self._place(number), -1)
        else:
            row = self._index_row(offset)
        drop = ("offset", "length", "index_offset")
        return {"row": number, **{key: value for key, value in row.items() if key not in drop}}

    def record(self, number: int) -> dict[str, Any]:
        """The episode itself, read from its place in the stream. Raises as `summary`."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        stream = self._run.inside(self._run.path / "traces" / "stream.jsonl")
        if stream is None:
            raise LookupError("the trace stream is gone")
        with stream.open("rb") as file:
            record = read_line(file, *self._place(number))
        if record is None:
            raise LookupError("the trace stream was changed")
        return record

    def _place(self, number: int) -> tuple[int, int]:
        return int(self.columns["offset"][number]), int(self.columns["length"][number])

    def _index_row(self, offset: int) -> dict[str, Any]:
        path = self._run.inside(self._run.path / "traces" / "index.jsonl")
        if path is None:
            raise LookupError("the index of the traces is gone")
        with path.open("rb") as file:
            file.seek(offset)
            row = _object(file.readline())
        if row is None:
            raise LookupError("the index of the traces was changed")
        return row


def mean_reward(rewards: list[Any]) -> float:
    """Mean over the agents that got a number; NaN if none did."""
    given = [float(reward) for reward in rewards if isinstance(reward, int | float)]
    return sum(given) / len(given) if given else float("nan")


def read_line(file: BinaryIO, offset: int, length: int) -> dict[str, Any] | None:
    """The JSON object at a place; None if there is none."""
    file.seek(offset)
    return _object(file.read(length))


def summarise(record: dict[str, Any], place: tuple[int, int], index_offset: int) -> dict[str, Any]:
    """The index row of an episode, made from its record."""
    traces = record["traces"]
    started, finished = record.get("started_at") or 0.0, record.get("finished_at") or 0.0
    head = {key: record.get(key) for key in ("id", "env", "group", "task_key", "policy")}
    return {
        **head,
        "step": record.get("step") or 0,
        "attempt": record.get("attempt") or 0,
        "agents": [trace["agent"] for trace in traces],
        "rewards": [trace["reward"] for trace in traces],
        "errors": [trace["error"]["type"] for trace in traces if trace.get("error")],
        "truncated": any(trace.get("is_truncated") for trace in traces),
        "turns": sum(trace.get("num_turns") or 0 for trace in traces),
        "tokens": sum(len(node["token_ids"]) for trace in traces for node in trace["nodes"]),
        "seconds": finished - started,
        "finished_at": finished,
        "offset": place[0],
        "length": place[1],
        "index_offset": index_offset,
    }


def _whole_lines(file: BinaryIO) -> bytes:
    """The next complete lines, about `CHUNK_BYTES` of them; empty at the end or before an unfinished line."""
    data = file.read(CHUNK_BYTES)
    if not data:
        return b""
    if not data.endswith(b"\n"):
        data += file.readline()
    end = data.rfind(b"\n") + 1
    return data[:end]


def _index_rows(chunk: bytes, start: int) -> Iterator[dict[str, Any]]:
    for line in chunk.splitlines(keepends=True):
        row = _object(line)
        if row is not None and "offset" in row and "length" in row:
            row["index_offset"] = start
            yield row
        start += len(line)


def _stream_rows(chunk: bytes, start: int) -> Iterator[dict[str, Any]]:
    for line in chunk.splitlines(keepends=True):
        record = _object(line)
        if record is not None and "traces" in record:
            yield summarise(record, (start, len(line) - 1), -1)
        start += len(line)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
