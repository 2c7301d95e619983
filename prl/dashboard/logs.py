"""Logs of all processes of an attempt as one, in the order of their times."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prl.dashboard.catalog import Run
from prl.log_lines import read_line

TAIL_BYTES = 1 << 20
MOST_LINES = 5000
HALF_DAY = 43_200
DAY = 86_400
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STARTED = re.compile(r"^# \d{4}-\d\d-\d\d (\d\d):(\d\d):(\d\d)", re.MULTILINE)


@dataclass(frozen=True)
class Filter:
    """What to show. `level` is the lowest; empty `components` means all; `text` is looked for in any case."""

    level: str = "DEBUG"
    components: tuple[str, ...] = ()
    text: str = ""
    limit: int = 1000


@dataclass(frozen=True)
class Line:
    """One line. `seconds` count from the midnight before the attempt; `serial` keeps a file's own order."""

    seconds: int
    component: str
    serial: int
    level: str
    text: str


def components(run: Run, attempt: int) -> dict[str, int]:
    """Component -> bytes of its log."""
    return {name: path.stat().st_size for name, path in _files(run, attempt)}


def merged(run: Run, attempt: int, asked: Filter) -> dict[str, Any]:
    """The newest lines that pass the filter, oldest first. Of a long log only its end is looked at."""
    start = _start_of(run, attempt)
    streams = []
    for name, path in _files(run, attempt):
        if not asked.components or name in asked.components:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - TAIL_BYTES))
                data = file.read()
            lines = data.decode(errors="replace").splitlines()
            streams.append(list(_lines(name, lines[1:] if size > TAIL_BYTES else lines, start)))
    everything = heapq.merge(*streams, key=lambda line: (line.seconds, line.component, line.serial))
    found = [line for line in everything if _passes(line, asked)]
    shown = found[-min(asked.limit, MOST_LINES) :]
    return {
        "components": components(run, attempt),
        "found": len(found),
        "lines": [[_clock(line.seconds), line.component, line.level, line.text] for line in shown],
    }


def _files(run: Run, attempt: int) -> list[tuple[str, Any]]:
    base = run.path / "logs" / f"attempt_{attempt}"
    pattern = f"logs/attempt_{attempt}/**/*.log"
    named = [(path, run.inside(path)) for path in sorted(run.path.glob(pattern))]
    return [(str(path.relative_to(base))[:-4], real) for path, real in named if real is not None]


def _lines(component: str, lines: list[str], start: int | None) -> Iterator[Line]:
    """Lines with times that go on past midnight; one without a stamp (a traceback) belongs to the last."""
    seconds, level, day = start or 0, "INFO", 0
    previous = start
    serial = 0
    for raw in lines:
        texts: tuple[str, ...] = (raw,)
        if told := read_line(raw):
            if previous is not None and told.clock < previous - HALF_DAY:
                day += DAY
            previous = told.clock
            seconds, level, texts = day + told.clock, told.level, (told.text, *told.more)
        for text in texts:
            yield Line(seconds, component, serial, level, text)
            serial += 1


def _passes(line: Line, asked: Filter) -> bool:
    lowest = LEVELS.index(asked.level) if asked.level in LEVELS else 0
    rank = LEVELS.index(line.level) if line.level in LEVELS else 1
    return rank >= lowest and asked.text.lower() in line.text.lower()


def _start_of(run: Run, attempt: int) -> int | None:
    """Seconds after midnight at which the attempt was launched."""
    path = run.inside(run.path / "configs" / f"attempt_{attempt}" / "command.txt")
    found = _STARTED.search(path.read_text(errors="replace")) if path else None
    if found is None:
        return None
    hours, minutes, seconds = map(int, found.groups())
    return hours * 3600 + minutes * 60 + seconds


def _clock(seconds: int) -> str:
    day, rest = divmod(seconds, DAY)
    text = f"{rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"+{day}d {text}" if day else text
