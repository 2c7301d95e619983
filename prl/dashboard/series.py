"""Curves from the metric streams of one run: read once, then only what is new."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from prl.dashboard.catalog import Run
from prl.tracking.names import MetricNames
from prl.tracking.reader import Record, StreamTail

STEP, TIME = "step", "time"


@dataclass
class Curve:
    """Points of one metric in file order. `steps` is NaN where a value has only a time (epoch seconds)."""

    steps: array = field(default_factory=lambda: array("d"))
    times: array = field(default_factory=lambda: array("d"))
    values: array = field(default_factory=lambda: array("d"))

    def add(self, step: int | None, time: float, value: float) -> None:
        self.steps.append(float("nan") if step is None else step)
        self.times.append(time)
        self.values.append(value)

    def forget_after(self, step: int) -> None:
        """Drop what a resume from `step` made void."""
        kept = [i for i, at in enumerate(self.steps) if not at > step]
        for name in ("steps", "times", "values"):
            column = getattr(self, name)
            setattr(self, name, array("d", (column[i] for i in kept)))


class _Stream:
    """One file: its tail, its curves by (producer, name), and when which step was told."""

    def __init__(self, path: Path) -> None:
        self.tail = StreamTail(path)
        self.curves: dict[tuple[str, str], Curve] = {}
        self.clock = Curve()
        self.inode = path.stat().st_ino

    def replaced(self) -> bool:
        """Whether the file is not the one that was read: another run took the directory."""
        try:
            told = self.tail.path.stat()
        except FileNotFoundError:
            return True
        return told.st_ino != self.inode or told.st_size < self.tail.offset

    def refresh(self) -> None:
        while records := self.tail.read():
            for record in records:
                self._take(record)

    def _take(self, record: Record) -> None:
        if record.resumed_from is not None:
            for curve in (*self.curves.values(), self.clock):
                curve.forget_after(record.resumed_from)
            return
        if record.step is not None:
            self.clock.add(record.step, record.time, record.step)
        for name, value in record.values.items():
            key = (record.producer, name)
            if key not in self.curves:
                self.curves[key] = Curve()
            self.curves[key].add(record.step, record.time, value)


class MetricTable:
    """All curves of a run, under the names that MLflow shows too."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._streams: dict[Path, _Stream] = {}
        self._names = MetricNames()

    def refresh(self) -> int:
        """Read what is new; returns a number that changes when the curves do."""
        with self._lock:
            for path in self._run.files("metrics/*.jsonl"):
                if path not in self._streams or self._streams[path].replaced():
                    self._streams[path] = _Stream(path)
                self._streams[path].refresh()
            gone = [path for path, stream in self._streams.items() if stream.replaced()]
            for path in gone:
                del self._streams[path]
            return sum(stream.tail.offset for stream in self._streams.values())

    def curves(self) -> dict[str, Curve]:
        """Every curve by its name."""
        return {self._names.of(*key): curve for key, curve in self._all()}

    def last_values(self) -> dict[str, float]:
        return {name: curve.values[-1] for name, curve in self.curves().items() if curve.values}

    def points(self, name: str, axis: str, limit: int) -> dict[str, list[float]] | None:
        """`{"x", "y"}` of one curve, thinned to about `limit` points; None if there is no such curve.

        A value without a step of its own stands at the newest step of its time.
        """
        curve = self.curves().get(name)
        if curve is None:
            return None
        x, y = self._places(curve, axis), np.frombuffer(curve.values.tobytes())
        order = np.argsort(x, kind="stable")
        x, y = thin(x[order], y[order], limit)
        return {"x": [round(float(v), 3) for v in x], "y": [float(v) for v in y]}

    def _places(self, curve: Curve, axis: str) -> np.ndarray:
        times = np.frombuffer(curve.times.tobytes())
        if axis == TIME:
            return times
        steps = np.frombuffer(curve.steps.tobytes())
        missing = np.isnan(steps)
        if not missing.any():
            return steps
        told, newest = self._clock()
        at = np.searchsorted(told, times, side="right") - 1
        found = newest[np.maximum(at, 0)] if len(newest) else np.zeros(len(times))
        return np.where(missing, np.where(at < 0, 0, found), steps)

    def _clock(self) -> tuple[np.ndarray, np.ndarray]:
        """(times, newest step at each), ascending."""
        clocks = [stream.clock for stream in self._streams.values()]
        times = np.concatenate([np.frombuffer(c.times.tobytes()) for c in clocks] or [np.empty(0)])
        steps = np.concatenate([np.frombuffer(c.values.tobytes()) for c in clocks] or [np.empty(0)])
        order = np.argsort(times, kind="stable")
        return times[order], np.maximum.accumulate(steps[order]) if len(order) else steps

    def _all(self) -> Iterator[tuple[tuple[str, str], Curve]]:
        with self._lock:
            pairs = [pair for stream in self._streams.values() for pair in stream.curves.items()]
        yield from pairs


def thin(x: np.ndarray, y: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Fewer points of the same shape: of each bucket its lowest and its highest, so that no spike is lost."""
    if len(x) <= limit:
        return x, y
    edges = np.linspace(0, len(x), max(1, limit // 2) + 1).astype(int)
    kept: set[int] = {0, len(x) - 1}
    for low, high in pairwise(edges):
        if high > low:
            kept |= {low + int(np.argmin(y[low:high])), low + int(np.argmax(y[low:high]))}
    chosen = sorted(kept)
    return x[chosen], y[chosen]
