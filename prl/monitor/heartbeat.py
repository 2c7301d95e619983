"""A sign of life for a watchdog elsewhere: a URL that is fetched as long as the run makes progress."""

from __future__ import annotations

import logging
import urllib.error
import urllib.request
from pathlib import Path

from prl.tracking.pulse import Pulse, told_bytes

log = logging.getLogger(__name__)

TIMEOUT = 1.0


class Heartbeat(Pulse):
    """Fetches `url` at most every `seconds`, only when the metric streams or traces of the run grew."""

    def __init__(self, url: str, run: Path, seconds: float) -> None:
        super().__init__("heartbeat", seconds)
        self._url = url
        self._run = run
        self._size = self._told()
        self._failing = False

    def beat(self) -> None:
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
        return told_bytes(self._run) + sum(
            path.stat().st_size for path in self._run.glob("traces/index*.jsonl")
        )
