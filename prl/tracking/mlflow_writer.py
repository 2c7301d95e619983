"""The single MLflow writer of a run: a thread of the launcher that copies the metric streams to the tracker.

The streams are the truth. The tracker may be slow, locked, down or wrong: the run goes on, the user is told
once, and what is missing follows when the tracker is back, in this attempt or in the next.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.run_dir import write_atomic
from prl.tracking.facts import Facts
from prl.tracking.mlflow_run import TrackedRun
from prl.tracking.mlflow_store import Store
from prl.tracking.names import MetricNames
from prl.tracking.reader import MetricTails, Record
from prl.tracking.secrets import redact
from prl.tracking.trace_sample import SampleState, TraceSample

log = logging.getLogger(__name__)

INTERVAL = 5.0
LONGEST_PAUSE = 60.0
FINAL_PAUSE = 0.5
NICENESS = 5
MANY_RECORDS = 1000
TRACE_FAILURES = 3
"""Failures in a row after which a tracker that takes metrics is asked for no traces any more."""
SLOW_SECONDS = 480.0
REGISTER_SECONDS = 600.0
"""What the registration of the finished run's model may take beyond everything else: it exports weights."""


@dataclass(frozen=True)
class Cursor:
    """What the MLflow run `run_id` has: bytes of each stream, and how far episodes were sampled."""

    run_id: str = ""
    offsets: dict[str, int] = field(default_factory=dict)
    sample: dict[str, int] = field(default_factory=dict)


class MlflowWriter:
    """Follows `<run>/metrics` until `close`. `say` tells the user something; it is called from the thread."""

    def __init__(
        self, facts: Facts, store: Store, say: Callable[[str], None], interval: float = INTERVAL
    ) -> None:
        self._say = say
        self._interval = interval
        self._cursor = facts.run.path / "mlflow_cursor.json"
        self._directory = facts.run.metrics
        self._saved = _read_cursor(self._cursor)
        self._tails = MetricTails(self._directory, self._saved.offsets)
        self._names_file = facts.run.path / "mlflow_names.json"
        self._names = MetricNames(_read_json(self._names_file))
        self._tracked = TrackedRun(facts, store, self._names, say)
        self._pending: list[Record] = []
        self._facts = facts
        self._sample = _trace_sample(facts, SampleState(**self._saved.sample))
        self._episodes: list[dict[str, Any]] = []
        self._trace_failures = 0
        self._troubled = False
        self._status_told = False
        self._settled = False
        self._status: str | None = None
        self._wake = threading.Event()
        self._deadline = 0.0
        self._thread = threading.Thread(target=self._work, name="mlflow", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def hurry(self) -> None:
        """Catch up now, so that less is left to do at the end."""
        self._wake.set()

    def close(self, status: str, timeout: float, impatient: Callable[[], bool] = lambda: False) -> bool:
        """Send what is left and record `status`; True if all of it arrived.

        Gives up after `timeout` seconds, or once `impatient` says so. A run that went well waits longer for a
        tracker that is at work and only slow, as where the runs of a sweep share a node.
        """
        if self._registers(status):
            timeout += REGISTER_SECONDS
        self._deadline = time.monotonic() + timeout
        self._status = status
        self._wake.set()
        while self._thread.is_alive() and time.monotonic() < self._limit(status) and not impatient():
            self._thread.join(0.1)
        over = not self._thread.is_alive()
        done = self._settled or (over and not self._troubled)
        if not done:
            missing = "the last metrics" if self._status_told else f"the last metrics and the status {status}"
            self._say(
                f"MLflow lacks {missing} of this run. "
                "They are in the run directory and follow when the run is resumed."
            )
        elif not over:
            self._say("MLflow lacks some of the plots and traces of this run; they are in the run directory")
        return done

    def _limit(self, status: str) -> float:
        return self._deadline + SLOW_SECONDS * (status == "FINISHED" and not self._troubled)

    def _work(self) -> None:
        lower_priority()
        pause = self._interval
        while self._pause(pause):
            # Nothing heavy before the first line: while the processes start they need the CPU more.
            if self._tracked.connected or self._read():
                pause = self._interval if self._catch_up() else min(2 * pause, LONGEST_PAUSE)
        if self._status == "KILLED" and not self._tracked.connected and not self._read():
            return  # stopped before it did anything: no trace in the tracker
        while not self._catch_up() and time.monotonic() < self._deadline:
            time.sleep(FINAL_PAUSE)

    def _pause(self, seconds: float) -> bool:
        """Sleep, but not through a call of `hurry` or `close`; False when it is time to end."""
        self._wake.wait(seconds)
        self._wake.clear()
        return self._status is None

    def _catch_up(self) -> bool:
        """Bring the tracker up to date; False if it could not be done now."""
        try:
            if not self._tracked.connected:
                self._tracked.connect()
                self._start_over_if_new()
            while self._read():
                if self._status not in (None, "FINISHED"):
                    self._tell_status()  # first: such a run leaves the tracker seconds only
                self._name(self._pending)
                self._tracked.log(self._pending)
                self._pending = []
                self._save_cursor()
            if self._status is not None:
                self._tell_status()
                self._settled = True
        except Exception as error:  # whatever the tracker does, the run goes on
            self._complain(error)
            return False
        if self._troubled:
            self._troubled = False
            self._say("MLflow is back and up to date")
        self._send_traces()
        if self._status is not None:
            self._add_results(self._status)
        return True

    def _tell_status(self) -> None:
        if self._status and not self._status_told:
            self._tracked.finish(self._status)
            self._status_told = True

    def _send_traces(self) -> None:
        """A tracker that takes metrics but no traces costs the traces only."""
        if self._sample is None or self._trace_failures >= TRACE_FAILURES:
            return
        try:
            self._episodes += self._sample.read(closing=self._status is not None)
            while self._episodes:
                self._tracked.log_traces(self._episodes[:1])
                del self._episodes[0]
                self._trace_failures = 0
            self._save_cursor()
        except Exception as error:  # whatever the tracker does, the run goes on
            log.debug("traces", exc_info=error)
            self._trace_failures += 1
            if self._trace_failures == TRACE_FAILURES:
                self._say(
                    f"MLflow takes no traces of episodes; they are in the run directory: {_text(error)}"
                )

    def _add_results(self, status: str) -> None:
        """What is made at the end; the status is on record before, whatever happens here."""
        try:
            self._tracked.add_results()
            if self._registers(status):
                name = self._facts.config.tracking.register_model
                self._say(f"MLflow has the weights as version {self._tracked.register_model(name)} of {name}")
        except Exception as error:  # whatever the tracker does, the run is over and its files are there
            log.debug("results", exc_info=error)
            self._say(f"MLflow lacks the plots or the weights of this run: {_text(error)}")

    def _registers(self, status: str) -> bool:
        return status == "FINISHED" and bool(self._facts.config.tracking.register_model)

    def _start_over_if_new(self) -> None:
        """A tracker that did not know the run gets all of it, whatever another one was told before."""
        if self._saved.run_id != self._tracked.run_id:
            self._tails = MetricTails(self._directory)
            self._pending, self._episodes = [], []
            self._sample = _trace_sample(self._facts, SampleState())

    def _read(self) -> list[Record]:
        """Records that are not in the tracker yet; a backlog is read as fast as the tracker takes it."""
        if len(self._pending) < MANY_RECORDS:
            self._pending += self._tails.read()
        return self._pending

    def _save_cursor(self) -> None:
        sample = dataclasses.asdict(self._sample.state) if self._sample else {}
        cursor = Cursor(self._tracked.run_id, self._tails.offsets, sample)
        write_atomic(self._cursor, json.dumps(dataclasses.asdict(cursor)))

    def _name(self, records: list[Record]) -> None:
        """Names are on disk before anything is sent under them: a metric never changes its name."""
        before = len(self._names.known)
        for record in records:
            for name in record.values:
                self._names.of(record.producer, name)
        if len(self._names.known) > before:
            write_atomic(self._names_file, json.dumps(self._names.known))

    def _complain(self, error: Exception) -> None:
        log.debug("tracker", exc_info=error)
        if not self._troubled:
            self._say(f"MLflow cannot be reached, the run goes on without it: {_text(error)}")
        self._troubled = True


def lower_priority() -> None:
    """Let the processes that train go first. On Linux niceness is a thread's own."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _trace_sample(facts: Facts, state: SampleState) -> TraceSample | None:
    """The episodes of an rl run; an evaluation sends its own sample with its results."""
    if facts.command != "rl":
        return None
    tracking = facts.config.tracking
    return TraceSample(
        facts.run.traces, tracking.traces_per_step, tracking.max_traces, facts.config.max_steps, state
    )


def _text(error: Exception) -> str:
    """An error in one line of bounded length."""
    return str(redact(" ".join(f"{type(error).__name__}: {error}".split())))[:300]


def _read_cursor(path: Path) -> Cursor:
    known = {entry.name for entry in dataclasses.fields(Cursor)}
    return Cursor(**{name: value for name, value in _read_json(path).items() if name in known})


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
