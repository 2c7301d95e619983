"""How the tasks of one job know of each other: small files in the run directory, each written by one task.

configs/attempt_n/nodes/node_K.json   {"state": "done" | "failed", ...}: by the task of node K > 0
configs/attempt_n/nodes/end.json      how the run ended: by the leading task
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.interrupts import Interrupts
from launchers.local import Outcome
from prl.checkpoint import stop
from prl.config.cluster import SlurmConfig, warning_seconds
from prl.run_dir import POLL_SECONDS, RunDir, write_atomic

CHECKPOINT_SHARE = 0.6
"""Of the time between the warning and the end, for the checkpoint; the rest takes everything down."""


@dataclass(frozen=True)
class NodeFiles:
    """The files of one attempt."""

    run: RunDir

    @property
    def directory(self) -> Path:
        return self.run.configs / "nodes"

    def of_node(self, node: int) -> Path:
        return self.directory / f"node_{node}.json"

    @property
    def end(self) -> Path:
        return self.directory / "end.json"

    def tell_end(self, outcome: Outcome) -> None:
        write_atomic(self.end, json.dumps({"status": outcome.status, "reason": outcome.reason}))


@dataclass
class Leader:
    """The leading task's view: failures elsewhere, SLURM's warning, and steps that do not come."""

    files: NodeFiles
    cluster: SlurmConfig
    interrupts: Interrupts
    others: Iterable[int]
    run: RunDir
    stoppable: bool
    stopped: bool = False
    _asked_until: float | None = None
    _progress: tuple[int, float] = field(default_factory=lambda: (0, time.monotonic()))

    def verdict(self) -> Outcome | None:
        return self._failure() or self._warning() or self._stuck()

    def finished(self) -> bool:
        return all(_read(self.files.of_node(node)).get("state") == "done" for node in self.others)

    def _failure(self) -> Outcome | None:
        told = [_read(path) for path in sorted(self.files.directory.glob("node_*.json"))]
        failed = [news for news in told if news.get("state") == "failed"]
        if not failed:
            return None
        first = min(failed, key=lambda news: float(news["time"]))
        return Outcome(1, "FAILED", first["reason"], tuple(first["culprits"]))

    def _warning(self) -> Outcome | None:
        """On SLURM's warning: ask for a checkpoint, and when it is there (or cannot be any more), stop."""
        if not self.interrupts.warned:
            return None
        if self._asked_until is None:
            self._asked_until = time.monotonic() + CHECKPOINT_SHARE * warning_seconds(self.cluster)
            stop.request(self.run)
        step = stop.stopped_at(self.run)
        if step is None and self.stoppable and time.monotonic() < self._asked_until:
            return None
        self.stopped = True
        made = f"checkpoint of step {step}" if step is not None else "no checkpoint was made in time"
        return Outcome(1, "KILLED", f"warned by SLURM; {made if self.stoppable else 'what is done is kept'}")

    def _stuck(self) -> Outcome | None:
        limit = self.cluster.step_timeout
        if limit is None or not self.stoppable:
            return None
        stream, now = self.run.metric_file("trainer"), time.monotonic()
        size = stream.stat().st_size if stream.exists() else 0
        if size != self._progress[0]:
            self._progress = (size, now)
        if now - self._progress[1] <= limit:
            return None
        return Outcome(1, "FAILED", f"no step within cluster.step_timeout = {limit:g} s", ("trainer/0",))


@dataclass
class Follower:
    """The view of a task that does not lead: it tells when its jobs are done, and ends with the leader."""

    files: NodeFiles
    node: int
    _told: bool = False

    def verdict(self) -> Outcome | None:
        end = _read(self.files.end)
        if not end:
            return None
        status = end["status"]
        return Outcome(0 if status == "FINISHED" else 1, status, f"node 0: {end['reason']}")

    def finished(self) -> bool:
        if not self._told:
            self._told = True
            write_atomic(self.files.of_node(self.node), json.dumps({"state": "done"}))
        return False

    def exit_code(self, outcome: Outcome) -> int:
        """0 once the leading task has told the end: its own exit code is then that of the job. Any other
        would let srun end it (`--kill-on-bad-exit`) while it still tracks, tells and requeues.
        """
        return 0 if self.files.end.exists() else outcome.code

    def tell_failure(self, outcome: Outcome, patience: float) -> None:
        """Tell what failed here, and give the leading task the time to end the run and to write it down."""
        if not outcome.culprits:
            return
        news: dict[str, Any] = {"state": "failed", "reason": outcome.reason, "culprits": outcome.culprits}
        write_atomic(self.files.of_node(self.node), json.dumps({**news, "time": time.time()}))
        deadline = time.monotonic() + patience
        while not self.files.end.exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)


def _read(path: Path) -> dict[str, Any]:
    """What a file tells; nothing while it is not there."""
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
