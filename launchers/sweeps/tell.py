"""What a sweep says when it is over, or of where it stands: a table, the report, the exit code."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.slurm.queue import active, ended_as
from launchers.sweeps.book import Book
from launchers.sweeps.report import write_report
from launchers.sweeps.track import publish

NOT_RUN = "not run"


@dataclass(frozen=True)
class Line:
    """One element in the table."""

    number: int
    overrides: list[str]
    state: str
    objective: float | None
    job: str
    log: str
    code: int | None


def lines_of(book: Book) -> list[Line]:
    """Every element that is known, ended or not, by number."""
    records, jobs = book.records(), book.jobs()
    waiting = {number: job for number, (job, _) in jobs.items() if number not in records}
    states = states_of(sorted(waiting.values()))
    lines = []
    for number, overrides in sorted(book.elements().items()):
        record, (job, log) = records.get(number), jobs.get(number, ("", ""))
        if record is None:
            state = states.get(job, NOT_RUN) if job else NOT_RUN
            lines.append(Line(number, overrides, state, None, job, log, None))
            continue
        where = record.log or log or str(book.run(number) / "logs" / "latest")
        lines.append(
            Line(number, overrides, record.outcome, record.objective, record.job or job, where, record.code)
        )
    return lines


def states_of(jobs: Sequence[str]) -> dict[str, str]:
    """SLURM's state of each job: of those that wait or run now, else how they ended."""
    if not jobs:
        return {}
    found: dict[str, str] = {}
    for array in sorted({job.split("_")[0] for job in jobs}):
        found |= active(array) or {}
    return ended_as([job for job in jobs if job not in found]) | found


def table(lines: Sequence[Line]) -> str:
    """Aligned text: number, overrides, state, objective, job, log."""
    rows = [("", "overrides", "state", "objective", "job", "log")]
    for line in lines:
        value = "" if line.objective is None else f"{line.objective:.4f}"
        overrides = " ".join(own_overrides(lines, line))
        rows.append((str(line.number), overrides, line.state, value, line.job or "-", _short(line.log)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    return "\n".join(
        "  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[5]]).rstrip()
        for row in rows
    )


def own_overrides(lines: Sequence[Line], line: Line) -> list[str]:
    """The overrides of `line` that not every element has."""
    if len(lines) < 2:
        return line.overrides
    common = set.intersection(*(set(other.overrides) for other in lines))
    return [word for word in line.overrides if word not in common]


def tell(book: Book) -> int:
    """Print the table and write the report; the exit code: that of the first element that failed, or 0."""
    lines = lines_of(book)
    print(table(lines))
    report = write_report(book)
    publish(book)
    print(f"report      {report}")
    failed = [line for line in lines if line.code != 0]
    told = [f"element {line.number}: {line.state}" for line in failed]
    print("\n  ".join([f"sweep: {len(lines)} runs, {len(failed)} failed", *told]), flush=True)
    return next((line.code or 1 for line in failed), 0)


def tell_if_last(book: Book) -> None:
    """Write the report once every element has ended: by the one that ends last, when nobody waits for it."""
    with (book.path / ".report.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if set(book.records()) >= set(book.elements()):
            write_report(book)
            publish(book)


def _short(path: str) -> str:
    """A path as seen from here, where that is shorter."""
    if not path:
        return "-"
    relative = os.path.relpath(path)
    return relative if len(relative) < len(path) else str(Path(path))
