"""The trace stream as the ledger of an evaluation: what is in it is done, exactly once.

`traces/stream.jsonl` has one line an episode, appended when the rollout ended. A line that a crash tore is
nobody's rollout. A rollout that ended well is never run again; one that failed is, and the later line counts.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.evals.sources import Key
from prl.records import Episode
from prl.run_dir import RunDir
from prl.tracking.stream import JsonLines

STREAM, INDEX = "stream.jsonl", "index.jsonl"
FAULT_WIDTH = 400


@dataclass(frozen=True, slots=True)
class AgentResult:
    """What one agent did in a rollout that ended well."""

    agent: str
    reward: float
    metrics: dict[str, float | None] = field(default_factory=dict)
    truncated: bool = False
    turns: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """One finished rollout. `errors` are the types of what failed; a row with errors has no result."""

    key: Key
    id: str
    errors: tuple[str, ...]
    agents: tuple[AgentResult, ...]
    seconds: float
    line: int
    """Number of its line in the stream, from 0."""

    @property
    def ok(self) -> bool:
        return not self.errors


class Ledger:
    """Appends finished rollouts; `settled` are the keys of those that need no further run."""

    def __init__(self, run: RunDir) -> None:
        self.settled = {key for key, row in read_rows(run).items() if row.ok}
        self._attempt = run.attempt
        self._stream = JsonLines(run.traces / STREAM)
        self._index = JsonLines(run.traces / INDEX)
        self._writing = asyncio.Lock()

    async def append(self, key: Key, episode: Episode, retries: int) -> None:
        """Put a rollout into the stream; it is on its way to the disk when this returns.

        Raises ValueError for a key that is settled: a rollout is counted once.
        """
        if key in self.settled:
            raise ValueError(f"{key} was finished before")
        if not any(trace.error for trace in episode.traces):
            self.settled.add(key)
        async with self._writing:
            await asyncio.to_thread(self._write, key, episode, retries)

    def close(self) -> None:
        self._stream.close()
        self._index.close()

    def _write(self, key: Key, episode: Episode, retries: int) -> None:
        from prl.orchestrator.traces import episode_record, index_record

        more = {"kind": "eval", "rollout": key.rollout, "retries": retries}
        record = {**episode_record(episode, key.step, self._attempt), **more}
        ((offset, length),) = self._stream.append(record)
        self._index.append({**index_record(episode, key.step, self._attempt, offset, length), **more})


def read_rows(run: RunDir) -> dict[Key, Row]:
    """Every finished rollout of a run: the first that ended well, else the last that failed."""
    rows: dict[Key, Row] = {}
    for number, record in read_stream(run.traces / STREAM):
        row = _row(number, record)
        if row.key not in rows or not rows[row.key].ok:
            rows[row.key] = row
    return rows


def read_stream(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line number, record) of every whole line; torn ones are left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "traces" in record:
                yield number, record


def records_at(path: Path, numbers: Iterable[int]) -> list[dict[str, Any]]:
    """The records on the given lines."""
    wanted = set(numbers)
    return [record for number, record in read_stream(path) if number in wanted]


def last_fault(run: RunDir) -> str:
    """`type: message` of the rollout that failed last, on one line; empty if none did."""
    faults = (
        trace["error"]
        for _, record in read_stream(run.traces / STREAM)
        for trace in record["traces"]
        if trace["error"]
    )
    last = deque(faults, maxlen=1)
    return " ".join(f"{last[0]['type']}: {last[0]['message']}".split())[:FAULT_WIDTH] if last else ""


def _row(number: int, record: dict[str, Any]) -> Row:
    traces = record["traces"]
    errors = tuple(trace["error"]["type"] for trace in traces if trace["error"])
    agents = tuple(
        AgentResult(
            trace["agent"], trace["reward"], trace["metrics"], trace["is_truncated"], trace["num_turns"]
        )
        for trace in traces
        if not errors
    )
    key = Key(record["step"], record["env"], record["task_key"], record["rollout"])
    return Row(key, record["id"], errors, agents, record["finished_at"] - record["started_at"], number)
