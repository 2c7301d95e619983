"""What a run says of itself when it is over."""

from __future__ import annotations

import shutil

from launchers.local import Outcome, tail
from launchers.run_directory import RunPlan
from prl.checkpoint.retention import complete_steps
from prl.run_dir import RunDir
from prl.tracking.board import Board

LEAST_FREE = 1 << 20
"""Bytes; with less than this, something that a process wrote did not fit."""
SPAN = 5
PER_LINE = 10
MOST_POINTS = 60


def failure_report(outcome: Outcome, run: RunDir) -> str:
    """Who ended the run and how, with the end of the log of each process at fault."""
    parts = [f"the run failed: {outcome.reason}"]
    for name in outcome.culprits:
        path = run.log_file(name)
        parts.append(f"--- end of {path} ---\n{tail(path) or '(empty)'}")
    return "\n".join([*parts, *full_disk(run)])


def full_disk(run: RunDir) -> list[str]:
    """A line if the run's file system is full: the logs lie on it too, so they may not say so themselves."""
    free = shutil.disk_usage(run.path).free
    if free >= LEAST_FREE:
        return []
    return [f"the disk is full: {free} bytes are free at {run.path}, and the ends of the logs may be lost"]


def summary(outcome: Outcome, run: RunDir, plan: RunPlan, board: Board, tracker: str | None) -> str:
    """The learning curve in numbers, and where everything is. `tracker`: the command that opens its UI."""
    steps = complete_steps(plan.checkpoints)
    checkpoints = f"{plan.checkpoints} (steps {', '.join(map(str, steps))})" if steps else "none"
    places = {
        "run": run.path,
        "logs": run.logs,
        "metrics": run.metrics,
        "traces": run.traces if run.traces.exists() else None,
        "checkpoints": checkpoints,
        "MLflow": tracker,
    }
    head = f"{outcome.status.lower()} at step {board.trained_step}"
    lines = [f"{head}: {outcome.reason}" if outcome.reason else head, *curve("reward", board.rewards())]
    if not board.rewards():
        lines += curve("loss", board.losses())
    return "\n".join([*lines, *(f"{name:12}{place}" for name, place in places.items() if place is not None)])


def curve(name: str, values: dict[int, float]) -> list[str]:
    """First and last steps (five, or half of a short run) in one line, then every step, ten a line; means of
    several in a long run."""
    if not values:
        return []
    steps, points = list(values), list(values.values())
    span = min(SPAN, max(1, len(points) // 2))
    first, last = sum(points[:span]) / span, sum(points[-span:]) / span
    stride = -(-len(points) // MOST_POINTS)
    shown = [sum(points[i : i + stride]) / len(points[i : i + stride]) for i in range(0, len(points), stride)]
    of = f"{span} steps" if span > 1 else "step"
    head = f"{name}: first {of} {first:.3f}, last {of} {last:.3f} ({last - first:+.3f})"
    lines = [head + (f"; below, means of {stride} steps" if stride > 1 else "")]
    for start in range(0, len(shown), PER_LINE):
        chunk = " ".join(f"{point:.3f}" for point in shown[start : start + PER_LINE])
        lines.append(f"  from step {steps[start * stride]:<4} {chunk}")
    return lines
