"""`prl status <run>`: how a run is, in a few lines; `--append` adds them to its STATUS.md.

It looks and writes down; it starts, stops and changes nothing, but names the command that would.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from launchers.run_directory import append_status
from prl.monitor.doctor import diagnose
from prl.monitor.findings import Finding, recent
from prl.monitor.observed import Observed, Observer, ending, find_run
from prl.monitor.watched import readings, seconds_left, spoken_time, who_waits

REFUSED = 2


@dataclass(frozen=True)
class Status:
    """One check-in. `health`: Healthy, Degraded or Down."""

    step: str
    health: str
    progress: str
    stability: str
    performance: str
    notes: tuple[str, ...]

    def lines(self) -> list[str]:
        """The entry below its heading."""
        told = {"progress": self.progress, "stability": self.stability, "performance": self.performance}
        return [f"{name}: {text}" for name, text in told.items() if text] + [f"note: {n}" for n in self.notes]


def main(words: Sequence[str]) -> int:
    """The tool; 0 for a healthy run, 1 for another, 2 without a run."""
    parser = argparse.ArgumentParser(prog="prl status", description=__doc__)
    parser.add_argument("run", help="run directory, or the name of a run in outputs")
    parser.add_argument(
        "--append", action="store_true", help="also add a dated entry to STATUS.md of the run"
    )
    parser.add_argument(
        "--every", type=float, metavar="MINUTES", help="look again after so many minutes until the run ends"
    )
    options = parser.parse_args(list(words))
    try:
        observer = Observer(find_run(options.run))
        while True:
            status = check_in(observer.look())
            tell(observer.observed, status, options.append)
            if options.every is None or ending(observer.observed.run) is not None:
                return int(status.health != "Healthy")
            time.sleep(60 * options.every)
    except (ValueError, OSError) as error:
        print(f"status: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return 130


def tell(observed: Observed, status: Status, append: bool) -> None:
    """Print the entry, and add it to the run's STATUS.md if asked to; earlier entries stay as they are."""
    head = f"{status.health} at step {status.step}"
    print(f"{observed.name}, attempt {observed.run.attempt}: {head}")
    print("".join(f"- {line}\n" for line in status.lines()), end="", flush=True)
    if append:
        append_status(observed.run, f"check-in: {head}", status.lines())


def check_in(observed: Observed) -> Status:
    """The state of a run, from what its directory tells."""
    found = diagnose(observed)
    how = ending(observed.run)
    notes = [f"the run is over: {how}"] if how else []
    notes += [f"{finding.name}: {finding.evidence}; try {finding.knob}" for finding in found]
    errors = observed.errors(10).most_common(3)
    if errors:
        notes.append("errors in the newest steps: " + ", ".join(f"{name} {count}" for name, count in errors))
    return Status(
        step=f"{observed.step}/{observed.max_steps or '∞'}",
        health=health(found, how),
        progress=_progress(observed, how),
        stability=_told(observed, ("mismatch_kl", "entropy", "grad_norm", "truncated", "errors")),
        performance=_performance(observed),
        notes=tuple(notes),
    )


def health(found: Sequence[Finding], how: str | None = None) -> str:
    """Down when nothing runs that should or the loss is lost, Degraded in trouble, else Healthy.

    `how`: how the run ended, if it did; one that was stopped before its end is down.
    """
    severities = {finding.severity for finding in found}
    if "down" in severities or how in ("FAILED", "KILLED"):
        return "Down"
    return "Degraded" if "trouble" in severities else "Healthy"


def _progress(observed: Observed, how: str | None) -> str:
    rewards, losses = observed.board.rewards(), observed.board.losses()
    name, curve = ("reward", rewards) if rewards else ("loss", losses)
    if not curve:
        return "no step yet"
    points = list(curve.values())
    span = min(10, max(1, len(points) // 2))  # what is compared must not overlap
    first, now = sum(points[:span]) / span, sum(points[-span:]) / span
    steps = "step" if span == 1 else f"{span} steps"
    text = f"{name} {now:.3f} over the newest {steps}, {first:.3f} over the first"
    left = None if how else seconds_left(observed)
    return text + (f", about {spoken_time(left)} left" if left else "")


def _told(observed: Observed, columns: Sequence[str]) -> str:
    found = {reading.watched.column: reading for reading in readings(observed)}
    parts = [f"{found[column].watched.label} {found[column].mean}" for column in columns if column in found]
    return ", ".join(parts)


def _performance(observed: Observed) -> str:
    speed, pace = (recent(observed.board.curve(name)) for name in ("tokens_per_second", "step_time"))
    parts = [f"{speed:,.0f} tokens/s"] if speed else []
    parts += [f"{pace:.1f} s a step"] if pace else []
    if waits := who_waits(observed):
        parts.append(f"waiting: {waits}")
    return ", ".join(parts)
