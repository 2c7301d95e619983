"""Two pictures of a sweep as SVG: learning curves by choice, and parallel coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from launchers.sweeps.statistics import Mean

COLOURS = ("#4878a8", "#d1605e", "#6a9f58", "#e49444", "#85549b", "#857aab", "#967662", "#1f8f8b")
WIDTH, HEIGHT = 640, 300
LEFT, TOP, BOTTOM = 56, 24, 36
LEGEND_LINE = 16


def curves_figure(curves: Mapping[str, Mapping[int, Mean]], name: str) -> str:
    """One line a choice over the steps, its 95 % interval shaded where there are several seeds."""
    points = [(step, mean) for curve in curves.values() for step, mean in curve.items()]
    lows = [mean.value - (mean.half or 0.0) for _, mean in points]
    highs = [mean.value + (mean.half or 0.0) for _, mean in points]
    across = _Scale(min(step for step, _ in points), max(step for step, _ in points), LEFT, LEFT + WIDTH)
    up = _Scale(min(lows), max(highs), TOP + HEIGHT, TOP)
    parts = [_text(LEFT, 14, f"{name} by step"), *_axes(across, up)]
    for index, (label, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += [_band(curve, across, up, colour), _line(curve, across, up, colour)]
        parts.append(_legend(index, label, colour))
    return _figure(parts, TOP + HEIGHT + BOTTOM + LEGEND_LINE * len(curves))


def parallel_figure(rows: Sequence[tuple[Mapping[str, str], float]], name: str) -> str:
    """One axis a swept key, the objective last; one line a choice, darker the better it is."""
    keys = [*rows[0][0], name]
    gap = WIDTH / max(len(keys) - 1, 1)
    xs = {key: LEFT + index * gap for index, key in enumerate(keys)}
    best, worst = max(value for _, value in rows), min(value for _, value in rows)
    up = _Scale(worst, best, TOP + HEIGHT, TOP)
    places = {key: _places([values[key] for values, _ in rows]) for key in keys[:-1]}
    parts = []
    for key in keys:
        x = xs[key]
        parts.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="#888"/>')
        parts.append(_text(x, TOP + HEIGHT + 28, key, anchor="middle"))
        ticks = places[key] if key in places else {f"{worst:.3g}": up(worst), f"{best:.3g}": up(best)}
        parts += [_text(x + 4, y + 4, value) for value, y in ticks.items()]
    for values, objective in sorted(rows, key=lambda row: row[1]):
        points = [(xs[key], places[key][values[key]]) for key in keys[:-1]] + [(xs[name], up(objective))]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        share = (objective - worst) / (best - worst) if best > worst else 1.0
        style = f'stroke="{COLOURS[0]}" stroke-opacity="{0.25 + 0.75 * share:.2f}" stroke-width="2"'
        label = " ".join(f"{key}={value}" for key, value in values.items())
        parts.append(
            f'<polyline points="{path}" fill="none" {style}><title>{escape(label)}: {objective:.4g}</title>'
            "</polyline>"
        )
    return _figure(parts, TOP + HEIGHT + BOTTOM)


class _Scale:
    """Numbers to pixels; a range without extent lies in the middle."""

    def __init__(self, low: float, high: float, first: float, last: float) -> None:
        self.low, self.high, self.first, self.last = low, high, first, last

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.first + share * (self.last - self.first)


def _places(values: Sequence[str]) -> dict[str, float]:
    """Height of each value of one axis, numbers in their order, words in that of the sweep."""
    distinct = list(dict.fromkeys(values))
    try:
        distinct.sort(key=float)
    except ValueError:
        distinct.reverse()  # the first of the command line on top
    scale = _Scale(0, len(distinct) - 1, TOP + HEIGHT, TOP)
    return {value: scale(index) for index, value in enumerate(distinct)}


def _axes(across: _Scale, up: _Scale) -> list[str]:
    floor = TOP + HEIGHT
    lines = [
        f'<line x1="{LEFT}" y1="{floor}" x2="{LEFT + WIDTH}" y2="{floor}" stroke="#888"/>',
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{floor}" stroke="#888"/>',
    ]
    steps = [_text(across(step), floor + 14, f"{step:g}", "middle") for step in {across.low, across.high}]
    values = [_text(LEFT - 4, up(value) + 4, f"{value:.3g}", "end") for value in {up.low, up.high}]
    return [*lines, *steps, *values]


def _line(curve: Mapping[int, Mean], across: _Scale, up: _Scale, colour: str) -> str:
    points = [(across(step), up(mean.value)) for step, mean in curve.items()]
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="3" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _band(curve: Mapping[int, Mean], across: _Scale, up: _Scale, colour: str) -> str:
    if len(curve) < 2 or any(mean.half is None for mean in curve.values()):
        return ""
    upper = [(across(step), up(mean.value + (mean.half or 0.0))) for step, mean in curve.items()]
    lower = [(across(step), up(mean.value - (mean.half or 0.0))) for step, mean in curve.items()]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in [*upper, *reversed(lower)])
    return f'<polygon points="{path}" fill="{colour}" fill-opacity="0.15"/>'


def _legend(index: int, label: str, colour: str) -> str:
    y = TOP + HEIGHT + BOTTOM + LEGEND_LINE * index
    return f'<rect x="{LEFT}" y="{y - 9}" width="10" height="10" fill="{colour}"/>' + _text(
        LEFT + 16, y, label
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _figure(parts: Sequence[str], height: int) -> str:
    size = f'width="{LEFT + WIDTH + 80}" height="{height + 12}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )
