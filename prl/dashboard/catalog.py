"""Which runs there are below the served directories. A client names a run by its id, never by a path."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

RESCAN_SECONDS = 2.0
DEEPEST = 4
MOST_DIRECTORIES = 20_000
_PASSED_BY = frozenset({"mlartifacts", "checkpoints", "broadcasts", "traces", "node_modules"})


@dataclass(frozen=True)
class Run:
    """A run directory (real path) found below a served root (real path)."""

    id: str
    path: Path
    root: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def group(self) -> str:
        """The directories between the root and the run: the sweep that it belongs to, or empty."""
        between = self.path.relative_to(self.root).parent
        return "" if between == Path() else str(between)

    def inside(self, path: Path) -> Path | None:
        """`path` if it is a file that really lies in the served directory, links followed; else None."""
        try:
            real = path.resolve(strict=True)
        except (OSError, RuntimeError):
            return None
        return real if real.is_file() and real.is_relative_to(self.root) else None

    def files(self, pattern: str) -> list[Path]:
        """Files of the run that match a glob pattern of this program's own, by name."""
        return [found for path in sorted(self.path.glob(pattern)) if (found := self.inside(path))]

    def attempts(self) -> list[int]:
        """Numbers of its launches, oldest first."""
        names = (entry.name for kind in ("configs", "logs") for entry in (self.path / kind).glob("attempt_*"))
        return sorted({int(number) for name in names if (number := name.removeprefix("attempt_")).isdigit()})


class UnknownRun(LookupError):
    """No run has this id."""


class Catalog:
    """Runs below `roots()`, looked for anew when the last look is old."""

    def __init__(self, roots: Callable[[], Sequence[Path]]) -> None:
        self._roots = roots
        self._lock = threading.Lock()
        self._runs: dict[str, Run] = {}
        self._looked = -RESCAN_SECONDS

    def runs(self) -> list[Run]:
        with self._lock:
            if time.monotonic() - self._looked >= RESCAN_SECONDS:
                found = [run for root in self._roots() for run in find_runs(root)]
                self._runs = {run.id: run for run in found}
                self._looked = time.monotonic()
            return list(self._runs.values())

    def get(self, run_id: str) -> Run:
        """The run with this id. Raises UnknownRun."""
        known = self._runs.get(run_id)
        if known is None:
            known = next((run for run in self.runs() if run.id == run_id), None)
        if known is None:
            raise UnknownRun(run_id)
        return known


def find_runs(root: Path) -> Iterator[Run]:
    """Every run at or below `root`; links to directories are not followed."""
    root = root.resolve()
    level, seen = [root], 0
    for depth in range(DEEPEST + 1):
        following: list[Path] = []
        for directory in level:
            seen += 1
            if seen > MOST_DIRECTORIES:
                return
            if is_run(directory):
                yield Run(hashlib.sha256(os.fsencode(directory)).hexdigest()[:12], directory, root)
            elif depth < DEEPEST:
                following += _subdirectories(directory)
        level = following


def is_run(directory: Path) -> bool:
    """Whether a directory has what a run leaves: configs of attempts, or metric streams."""
    return any((directory / "configs").glob("attempt_*")) or any((directory / "metrics").glob("*.jsonl"))


def _subdirectories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return sorted(
                Path(entry.path)
                for entry in entries
                if entry.is_dir(follow_symlinks=False)
                and entry.name not in _PASSED_BY
                and entry.name[0] != "."
            )
    except OSError:  # gone meanwhile, or not ours to read
        return []
