"""The book of a sweep, in its directory: which elements it has, and how each of them ended.

sweep.json          the command, so that the same command finds its sweep again; the elements' overrides
jobs.json           SLURM's job and log of each element that was submitted
records/<n>.json    how element n ended, written when it did
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.run_dir import write_atomic

BOOK = "sweep.json"


@dataclass(frozen=True)
class Record:
    """How one element ended. `code` 0: well. `objective`: what the sweep compares, if it was measured."""

    number: int
    overrides: list[str]
    code: int
    objective: float | None = None
    job: str | None = None
    log: str | None = None
    state: str | None = None

    @property
    def finished(self) -> bool:
        return self.code == 0

    @property
    def outcome(self) -> str:
        """`finished`, `exit code 1`, or SLURM's own word for it."""
        return "finished" if self.finished else self.state or f"exit code {self.code}"


@dataclass(frozen=True)
class Book:
    """The book in `path`, the directory of one sweep."""

    path: Path

    def open(self, command: str, words: Sequence[str], elements: Sequence[Sequence[str]] | None) -> None:
        """Begin the book, or go on with it. Raises ValueError when the directory holds another sweep.

        `words`: what was typed; `elements`: overrides of each element, None when a sweeper decides later.
        """
        facts = {"command": command, "words": list(words), "elements": elements and list(map(list, elements))}
        if self.exists:
            known = self._facts()
            if (known["command"], known["words"]) != (command, facts["words"]):
                raise ValueError(
                    f"hydra.sweep.dir = {self.path}: it holds the sweep of another command "
                    f"({' '.join(known['words'])}). Choose another directory."
                )
            return
        write_atomic(self.path / BOOK, json.dumps({**facts, "time": time.time()}, indent=1) + "\n")

    @property
    def exists(self) -> bool:
        return (self.path / BOOK).exists()

    @property
    def command(self) -> str:
        return str(self._facts()["command"])

    @property
    def words(self) -> list[str]:
        return list(self._facts()["words"])

    def elements(self) -> dict[int, list[str]]:
        """Overrides of each element by number; of those that are known when a sweeper decides."""
        told = self._facts()["elements"]
        known = {record.number: record.overrides for record in self.records().values()}
        return known if told is None else dict(enumerate(told))

    def record(self, record: Record) -> None:
        write_atomic(
            self._record_file(record.number), json.dumps(dataclasses.asdict(record), indent=1) + "\n"
        )

    def of(self, number: int) -> Record | None:
        """The record of an element; None while it has not ended."""
        try:
            return Record(**json.loads(self._record_file(number).read_text()))
        except FileNotFoundError:
            return None

    def forget(self, number: int) -> None:
        """Element `number` starts once more."""
        self._record_file(number).unlink(missing_ok=True)

    def records(self) -> dict[int, Record]:
        files = (self.path / "records").glob("[0-9]*.json")
        found = [Record(**json.loads(file.read_text())) for file in files]
        return {record.number: record for record in sorted(found, key=lambda record: record.number)}

    def note_jobs(self, jobs: Mapping[int, tuple[str, str]]) -> None:
        """Add (job, log) of submitted elements by number."""
        write_atomic(self.path / "jobs.json", json.dumps({**self.jobs(), **jobs}, indent=1) + "\n")

    def jobs(self) -> dict[int, tuple[str, str]]:
        try:
            told: dict[str, Any] = json.loads((self.path / "jobs.json").read_text())
        except FileNotFoundError:
            return {}
        return {int(number): (job, log) for number, (job, log) in told.items()}

    def run(self, number: int) -> Path:
        """The run directory of an element."""
        return self.path / str(number)

    def _record_file(self, number: int) -> Path:
        return self.path / "records" / f"{number}.json"

    def _facts(self) -> dict[str, Any]:
        return dict(json.loads((self.path / BOOK).read_text()))


def find(parent: Path, command: str, words: Sequence[str]) -> Book | None:
    """The newest sweep below `parent` that this very command began."""
    found = []
    for file in parent.glob(f"*/{BOOK}"):
        facts = json.loads(file.read_text())
        if (facts["command"], facts["words"]) == (command, list(words)):
            found.append((facts["time"], file.parent))
    return Book(max(found)[1]) if found else None
