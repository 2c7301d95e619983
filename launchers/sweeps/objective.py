"""The number by which a sweep compares its runs, read from a run's own files."""

from __future__ import annotations

import re
from pathlib import Path

from prl.tracking.board import Board
from prl.tracking.reader import read_metrics

EVALUATED = re.compile(r"eval/[^/]+/effective/[^/]+/avg@\d+")
SPAN = 5
"""Steps at the end of a run over which a training curve is averaged."""


def curve_of(run: Path) -> tuple[str, dict[int, float]]:
    """(`reward` or `loss`, its mean by step) of a training run; the curve is empty when there is none."""
    board = Board()
    board.update(read_metrics(run / "metrics"))
    rewards = board.rewards()
    return ("reward", rewards) if rewards else ("loss", board.losses())


def objective_of(run: Path) -> tuple[str, float] | None:
    """(name, value) of what a run reached: its last evaluation, else the reward of its last five steps, else
    minus the loss of these, so that more is always better. None when nothing was measured.
    """
    evaluated = _last_evaluation(run)
    if evaluated is not None:
        return "eval reward", evaluated
    name, curve = curve_of(run)
    last = list(curve.values())[-SPAN:]
    if not last:
        return None
    mean = sum(last) / len(last)
    return (name, mean) if name == "reward" else ("-loss", -mean)


def _last_evaluation(run: Path) -> float | None:
    """Mean over environments and agents of the newest evaluation's reward, in training or of `prl eval`."""
    newest: dict[str, tuple[int, float]] = {}
    for record in read_metrics(run / "metrics"):
        for name, value in record.values.items():
            step = record.step or 0
            if EVALUATED.fullmatch(name) and (name not in newest or step >= newest[name][0]):
                newest[name] = (step, value)
    return sum(value for _, value in newest.values()) / len(newest) if newest else None
