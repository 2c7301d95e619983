"""Which episodes the tracker gets: a few of some steps, chosen by chance, bounded for the whole run.

Follows `traces/index.jsonl` (one short line an episode) and reads of the stream only what was chosen.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHUNK_BYTES = 1 << 20
ENDLESS_STRIDE = 10
"""Steps from one sample to the next in a run without an end."""


@dataclass
class SampleState:
    """How far the index was read, and how many episodes were handed out; kept over a resume."""

    offset: int = 0
    sent: int = 0


@dataclass
class TraceSample:
    """Episodes for the tracker, step by step. `per_step` of a step, `most` of the run; 0 = none."""

    directory: Path
    per_step: int
    most: int
    max_steps: int | None
    state: SampleState = field(default_factory=SampleState)
    _step: int | None = None
    _seen: int = 0
    _chosen: list[dict[str, Any]] = field(default_factory=list)

    @property
    def stride(self) -> int:
        """Steps from one sample to the next, so that the allowance lasts to the end."""
        if self.max_steps is None:
            return ENDLESS_STRIDE
        return max(1, -(-self.max_steps * self.per_step // self.most)) if self.most else 1

    def read(self, closing: bool = False) -> list[dict[str, Any]]:
        """Records of the episodes chosen of steps that are over; with `closing`, of the last one too.

        A step is over when an episode of a later one is in the index. Reads a bounded part of the index.
        """
        if not self.per_step or self.state.sent >= self.most:
            return []
        due: list[dict[str, Any]] = []
        for row in self._rows():
            if row["step"] != self._step:
                due += self._hand_out()
                self._step, self._seen = row["step"], 0
            self._consider(row)
        return self._load(due + (self._hand_out() if closing else []))

    def _rows(self) -> Iterator[dict[str, Any]]:
        try:
            with (self.directory / "index.jsonl").open("rb") as file:
                file.seek(self.state.offset)
                data = file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self.state.offset += len(complete)
        for line in complete.splitlines():
            try:
                yield json.loads(line)
            except ValueError:  # torn by a crash
                continue

    def _consider(self, row: dict[str, Any]) -> None:
        """Every episode of a step has the same chance, however many there are; the choice repeats."""
        step = row["step"]
        beyond = self.max_steps is not None and step > self.max_steps  # sampled ahead, never trained
        if beyond or (step != 1 and step % self.stride):
            return
        self._seen += 1
        if len(self._chosen) < self.per_step:
            self._chosen.append(row)
            return
        place = random.Random(f"{step} {self._seen}").randrange(self._seen)
        if place < self.per_step:
            self._chosen[place] = row

    def _hand_out(self) -> list[dict[str, Any]]:
        chosen, self._chosen = self._chosen[: self.most - self.state.sent], []
        self.state.sent += len(chosen)
        return chosen

    def _load(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not rows:
            return []
        with (self.directory / "stream.jsonl").open("rb") as file:
            return [_record_at(file, row) for row in rows]


def _record_at(file: Any, row: dict[str, Any]) -> dict[str, Any]:
    file.seek(row["offset"])
    return json.loads(file.read(row["length"]))
