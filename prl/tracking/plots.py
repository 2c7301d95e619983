"""Curves of a run as SVG: reward, mismatch KL, entropy, gradient norm, and who waited for whom."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from prl.run_dir import write_atomic
from prl.tracking.board import Board

WIDTH, HEIGHT = 640, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 30
COLOURS = ("#4878a8", "#c44e52")
MOST_POINTS = 400

Curve = Mapping[int, float]
"""Value by step."""


@dataclass(frozen=True)
class Plot:
    """One picture: a title, its curves by name, whether the axis is logarithmic."""

    title: str
    curves: Mapping[str, Curve]
    logarithmic: bool = False


def plots_of(board: Board) -> dict[str, Plot]:
    """File name (without ending) -> plot, for everything of which the board has two points or more."""
    wanted = {
        "reward": Plot("mean reward of the trained rollouts", {"reward": board.curve("reward")}),
        "loss": Plot("loss", {"loss": board.curve("loss")}),
        "mismatch_kl": Plot("mismatch KL (log scale)", {"mismatch KL": board.curve("mismatch_kl")}, True),
        "entropy": Plot("entropy, nats per token", {"entropy": board.curve("entropy")}),
        "grad_norm": Plot("gradient norm", {"gradient norm": board.curve("grad_norm")}),
        "truncated": Plot("share of truncated rollouts", {"truncated": board.curve("truncated")}),
        "waits": Plot(
            "who waits for whom, seconds per step",
            {
                "trainer waits for rollouts": board.curve("wait_for_batch"),
                "rollouts wait for the trainer": board.curve("wait_for_policy"),
            },
        ),
    }
    return {name: plot for name, plot in wanted.items() if any(len(c) > 1 for c in plot.curves.values())}


def write_plots(board: Board, directory: Path) -> list[Path]:
    """Write every plot of `plots_of` as `<directory>/<name>.svg`; the files."""
    files = []
    for name, plot in plots_of(board).items():
        files.append(directory / f"{name}.svg")
        write_atomic(files[-1], figure(plot))
    return files


def figure(plot: Plot) -> str:
    """The plot as an SVG. Values that a logarithmic axis cannot show are left out."""
    curves = {name: _points(curve, plot.logarithmic) for name, curve in plot.curves.items()}
    curves = {name: points for name, points in curves.items() if points}
    steps = [step for points in curves.values() for step, _ in points] or [0, 1]
    values = [value for points in curves.values() for _, value in points] or [0.0, 1.0]
    low, high = _limits(values)
    parts = [f'<text x="{LEFT}" y="20" font-weight="bold">{escape(plot.title)}</text>']
    parts += _axes(min(steps), max(steps), low, high, plot.logarithmic)
    for place, (name, points) in enumerate(curves.items()):
        parts += _line(points, (min(steps), max(steps)), (low, high), COLOURS[place % len(COLOURS)])
        if len(curves) > 1:
            at = f'x="{LEFT + 8 + 200 * place}" y="{TOP + 12}"'
            parts.append(f'<text {at} fill="{COLOURS[place]}">{escape(name)}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="11"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><rect width="100%" height="100%" fill="white"/>'
        f"{''.join(parts)}</svg>\n"
    )


def _points(curve: Curve, logarithmic: bool) -> list[tuple[int, float]]:
    """Ordered by step, thinned to means of neighbours where there are too many."""
    kept = [(step, value) for step, value in sorted(curve.items()) if math.isfinite(value)]
    if logarithmic:
        kept = [(step, math.log10(value)) for step, value in kept if value > 0]
    stride = -(-len(kept) // MOST_POINTS) if kept else 1
    groups = [kept[start : start + stride] for start in range(0, len(kept), stride)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]


def _limits(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return (max(low - pad, 0.0) if low >= 0 else low - pad), high + pad


def _axes(first: int, last: int, low: float, high: float, logarithmic: bool) -> list[str]:
    parts = []
    for share in (0.0, 0.5, 1.0):
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - share)
        value = low + share * (high - low)
        text = f"{10**value:.1e}" if logarithmic else f"{value:.3g}"
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>')
    base = HEIGHT - BOTTOM + 16
    parts.append(f'<text x="{LEFT}" y="{base}">step {first}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{base}" text-anchor="end">{last}</text>')
    return parts


def _line(
    points: Sequence[tuple[int, float]], steps: tuple[int, int], limits: tuple[float, float], colour: str
) -> list[str]:
    wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    span, reach = max(steps[1] - steps[0], 1), limits[1] - limits[0]
    places = " ".join(
        f"{LEFT + wide * (step - steps[0]) / span:.1f},{TOP + tall * (limits[1] - value) / reach:.1f}"
        for step, value in points
    )
    return [f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
