"""What was read of runs, kept between requests; runs that nobody looked at for long are let go."""

from __future__ import annotations

import threading
from collections import OrderedDict

from prl.dashboard.annotations import Annotations
from prl.dashboard.catalog import Run
from prl.dashboard.episode_index import EpisodeIndex
from prl.dashboard.series import MetricTable

MOST_RUNS = 32


class OpenRun:
    """The readers of one run; each reads only when it is asked."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metrics = MetricTable(run)
        self.episodes = EpisodeIndex(run)
        self.annotations = Annotations(run)


class Shelf:
    """The most recently used runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[str, OpenRun] = OrderedDict()

    def take(self, run: Run) -> OpenRun:
        with self._lock:
            opened = self._open.get(run.id)
            if opened is None:
                opened = self._open[run.id] = OpenRun(run)
            self._open.move_to_end(run.id)
            while len(self._open) > MOST_RUNS:
                self._open.popitem(last=False)
            return opened
