"""A run as its directory tells it: configuration, metrics by step, how its newest attempt goes."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from prl.run_dir import RunDir
from prl.tracking.board import Board
from prl.tracking.reader import MetricTails, Record

SILENT_SECONDS = 300.0
SILENT_STEPS = 10
"""A run that tells nothing for so many of its own steps, and for five minutes, is not at work any more."""
_ATTEMPT = re.compile(r"^## .*: attempt (\d+) (started|ended: (\w+))", re.MULTILINE)
_KEPT = re.compile(
    r"train/agg/all/[^/]+/(is_trainable/mean|solved_none|solved_all|error/.+)"
    r"|time/(step|wait_for_policy|save_ckpt)|off_policy/dropped|progress/rollouts"
)
"""Curves that a question is asked of, beside those of the board: a long run has millions of other points."""
_ERROR = re.compile(r"train/agg/all/([^/]+)/error/(.+)")


@dataclass
class Observed:
    """What is known of a run. `curves`: producer -> metric -> value by step, of the metrics that diagnoses
    ask for; `latest`: the values that have no step, by producer; `heard`: time of the newest line."""

    run: RunDir
    config: dict[str, Any] = field(default_factory=dict)
    board: Board = field(default_factory=Board)
    curves: dict[str, dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    latest: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    heard: float = 0.0
    first_heard: float | None = None

    @property
    def name(self) -> str:
        return self.run.path.name

    @property
    def max_steps(self) -> int | None:
        return self.config.get("max_steps")

    @property
    def step(self) -> int:
        """The newest trained step."""
        return self.board.trained_step

    def curve(self, producer: str, name: str) -> dict[int, float]:
        """A kept metric by step; empty if it was never told."""
        return self.curves.get(producer, {}).get(name, {})

    def errors(self, last: int | None = None) -> Counter[str]:
        """Failed rollouts by type, of the newest `last` steps (None: all)."""
        found: Counter[str] = Counter()
        for name, curve in self.curves.get("orchestrator", {}).items():
            if match := _ERROR.fullmatch(name):
                newest = max(self.board.rows, default=0)
                kept = (value for step, value in curve.items() if last is None or step > newest - last)
                found[match[2]] += int(sum(kept))
        return +found

    def take(self, records: Iterable[Record]) -> None:
        """Take in new lines of the streams, in the order of their times."""
        records = list(records)
        self.board.update(records)
        for record in records:
            self.heard = max(self.heard, record.time)
            self.first_heard = record.time if self.first_heard is None else self.first_heard
            if record.resumed_from is not None:
                self._forget_after(record.resumed_from)
            elif record.step is None:
                self.latest[record.producer] |= record.values
            else:
                for name in filter(_kept, record.values):
                    self.curves[record.producer][name][record.step] = record.values[name]

    def _forget_after(self, last: int) -> None:
        for curves in self.curves.values():
            for name, curve in curves.items():
                curves[name] = {step: value for step, value in curve.items() if step <= last}


@functools.lru_cache(maxsize=100_000)
def _kept(name: str) -> bool:
    return _KEPT.fullmatch(name) is not None


class Observer:
    """Follows a run directory: `look` brings `observed` up to date."""

    def __init__(self, path: Path) -> None:
        run = RunDir(path, newest_attempt(path))
        self.observed = Observed(run, read_config(run))
        self.observed.board.max_steps = self.observed.max_steps
        self._tails = MetricTails(run.metrics)

    def look(self) -> Observed:
        """Read everything that is new."""
        while records := self._tails.read():
            self.observed.take(records)
        attempt = newest_attempt(self.observed.run.path)
        if attempt != self.observed.run.attempt:
            self.observed.run = RunDir(self.observed.run.path, attempt)
            self.observed.config = read_config(self.observed.run)
            self.observed.board.max_steps = self.observed.max_steps
        return self.observed


def observe(path: Path) -> Observed:
    """One look at the run directory `path`."""
    return Observer(path).look()


def find_run(word: str, parents: tuple[str, ...] = (".", "outputs")) -> Path:
    """The run directory that `word` means: a path, or a name below `outputs`.

    Raises ValueError if there is none.
    """
    for parent in parents:
        path = (Path(parent) / Path(word).expanduser()).absolute()
        if any((path / "configs").glob("attempt_*")):
            return path.resolve()
    known = sorted(entry.parent.name for entry in Path("outputs").glob("*/configs"))
    there = f" Runs in outputs: {', '.join(known[-10:])}." if known else ""
    raise ValueError(f"{word}: no run directory here and no run of this name in outputs.{there}")


def newest_attempt(path: Path) -> int:
    """Number of the newest attempt; 1 if there is none."""
    numbers = [entry.name.removeprefix("attempt_") for entry in path.glob("configs/attempt_*")]
    return max((int(number) for number in numbers if number.isdigit()), default=1)


def read_config(run: RunDir) -> dict[str, Any]:
    """The resolved config of the run's attempt; empty if it cannot be read."""
    try:
        tree = yaml.safe_load(run.resolved_config.read_text())
    except (OSError, yaml.YAMLError):
        return {}
    return tree if isinstance(tree, dict) else {}


def ending(run: RunDir) -> str | None:
    """FINISHED, FAILED or KILLED as the launcher noted it of the newest attempt; None while it goes on."""
    try:
        text = (run.path / "STATUS.md").read_text(errors="replace")
    except FileNotFoundError:
        return None
    found = [(int(number), how) for number, _, how in _ATTEMPT.findall(text)]
    mine = [how for number, how in found if number == run.attempt]
    return mine[-1] or None if mine else None


def silence(observed: Observed, now: float | None = None) -> float | None:
    """Seconds without a sign of life, where that is too long for a run that has not ended; else None."""
    if ending(observed.run) is not None:
        return None
    files = [*observed.run.logs.glob("*.log"), *observed.run.logs.glob("*/*.log")]
    if not observed.heard:
        files += [path for path in (observed.run.resolved_config, observed.run.path) if path.exists()]
    signs = [observed.heard, *(path.stat().st_mtime for path in files)]
    quiet = (time.time() if now is None else now) - max(signs)
    steps = [row.step_time for row in observed.board.rows.values() if row.step_time is not None]
    usual = max(steps[-10:], default=0.0)
    return quiet if quiet > max(SILENT_SECONDS, SILENT_STEPS * usual) else None
