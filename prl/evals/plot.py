"""The distribution of rewards as an SVG: one histogram an agent of each environment and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from prl.evals.results import Results
from prl.run_dir import write_atomic

BINS = 20
WIDTH, HEIGHT, MARGIN, TITLE = 360, 140, 12, 34


def write_plot(results: Results, path: Path) -> None:
    """Nothing is written where nothing was measured."""
    panels = [
        (_title(score.step, score.env, agent), [r for rewards in found.rewards.values() for r in rewards])
        for score in results.scores
        for agent, found in score.agents.items()
    ]
    if panels:
        write_atomic(path, figure(panels))


def histogram(values: Sequence[float], low: float, high: float) -> list[int]:
    """Counts of `values` in `BINS` equal bins of [low, high]."""
    counts = [0] * BINS
    for value in values:
        share = (value - low) / (high - low)
        counts[min(int(share * BINS), BINS - 1)] += 1
    return counts


def figure(panels: Sequence[tuple[str, Sequence[float]]]) -> str:
    """An SVG with one panel below the other, all on the same reward axis."""
    everything = [value for _, values in panels for value in values]
    low, high = min(0.0, *everything, 0.0), max(1.0, *everything, 1.0)
    step = HEIGHT + TITLE
    body = "".join(_panel(title, values, low, high, i * step) for i, (title, values) in enumerate(panels))
    size = f'width="{WIDTH + 2 * MARGIN}" height="{len(panels) * step + MARGIN}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/>{body}</svg>\n'
    )


def _panel(title: str, values: Sequence[float], low: float, high: float, top: int) -> str:
    counts = histogram(values, low, high)
    bar, most, floor = WIDTH / BINS, max(counts), top + TITLE + HEIGHT - 20
    parts = [f'<text x="{MARGIN}" y="{top + 22}">{escape(title)}, {len(values)} rewards</text>']
    for index, count in enumerate(counts):
        tall = (HEIGHT - 20) * count / most if most else 0.0
        place = (
            f'x="{MARGIN + index * bar:.1f}" y="{floor - tall:.1f}" width="{bar - 1:.1f}" height="{tall:.1f}"'
        )
        parts.append(f'<rect {place} fill="#4878a8"><title>{count}</title></rect>')
    parts.append(f'<line x1="{MARGIN}" x2="{MARGIN + WIDTH}" y1="{floor}" y2="{floor}" stroke="black"/>')
    for value, anchor, x in ((low, "start", MARGIN), (high, "end", MARGIN + WIDTH)):
        parts.append(f'<text x="{x}" y="{floor + 14}" text-anchor="{anchor}">{value:g}</text>')
    return "".join(parts)


def _title(step: int, env: str, agent: str) -> str:
    return f"{env}, {agent}" + (f", step {step}" if step else "")
