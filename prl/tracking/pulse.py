"""A thread that does something every now and then while a run goes on, and what tells that it is at work."""

from __future__ import annotations

import abc
import threading
from pathlib import Path


class Pulse(abc.ABC):
    """Calls `beat` every `seconds` from a daemon thread, from `start` until `close`."""

    def __init__(self, name: str, seconds: float) -> None:
        self._seconds = seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)

    @abc.abstractmethod
    def beat(self) -> None:
        """What is done; an exception ends the thread."""

    def end(self) -> None:  # noqa: B027 (most have nothing to close)
        """What the same thread does last."""

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        self._stop.set()
        self._thread.join(timeout)

    def _follow(self) -> None:
        while not self._stop.wait(self._seconds):
            self.beat()
        self.end()


def told_bytes(run: Path) -> int:
    """Bytes of the metric streams without system metrics, which go on when nothing else does."""
    streams = (path for path in run.glob("metrics/*.jsonl") if path.name != "system.jsonl")
    return sum(path.stat().st_size for path in streams)
