"""A sign of life for a watchdog elsewhere: a URL that is fetched as long as the run makes progress."""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from pathlib import Path

log = logging.getLogger(__name__)

TIMEOUT = 1.0


class Heartbeat:
    """Fetches `url` at most every `seconds`, only when the metric streams or traces of the run grew."""

    def __init__(self, url: str, run: Path, seconds: float) -> None:
        self._url = url
        self._run = run
        self._seconds = seconds
        self._size = self._told()
        self._failing = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout: float = 2.0) -> None:
        self._stop.set()
        self._thread.join(timeout)

    def _follow(self) -> None:
        while not self._stop.wait(self._seconds):
            size = self._told()
            if size > self._size and self._fetch():
                self._size = size

    def _fetch(self) -> bool:
        """True if the beat arrived. One that did not is sent again at the next turn, progress or not."""
        try:
            with urllib.request.urlopen(self._url, timeout=TIMEOUT):
                self._failing = False
                return True
        except (urllib.error.URLError, OSError, ValueError) as error:
            if not self._failing:
                log.warning("the heartbeat did not arrive, the run goes on: %s", error)
            self._failing = True
            return False

    def _told(self) -> int:
        """Bytes of what only work makes longer: system metrics go on when nothing else does."""
        streams = (path for path in self._run.glob("metrics/*.jsonl") if path.name != "system.jsonl")
        return sum(path.stat().st_size for path in (*streams, *self._run.glob("traces/index*.jsonl")))
