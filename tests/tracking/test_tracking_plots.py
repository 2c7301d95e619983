from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from prl.tracking.board import Board, Row
from prl.tracking.plots import (
    HEIGHT,
    LEFT,
    MOST_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Plot,
    figure,
    plots_of,
    write_plots,
)

SVG = "{http://www.w3.org/2000/svg}"


def points(svg: str) -> list[list[tuple[float, float]]]:
    """The curves as an SVG reader sees them."""
    lines = ElementTree.fromstring(svg).iter(f"{SVG}polyline")
    return [[tuple(map(float, p.split(","))) for p in line.attrib["points"].split()] for line in lines]  # type: ignore[misc]


def board(steps: int = 3) -> Board:
    found = Board()
    for step in range(1, steps + 1):
        found.rows[step] = Row(step, reward=step / 10, entropy=1.0 / step, wait_for_batch=1.0, trained=True)
    return found


def test_a_curve_runs_from_left_to_right_and_upwards_with_its_values() -> None:
    (line,) = points(figure(Plot("reward", {"r": {1: 0.0, 2: 5.0, 3: 10.0}})))
    assert [x for x, _ in line] == [LEFT, LEFT + (WIDTH - LEFT - RIGHT) / 2, WIDTH - RIGHT]
    heights = [y for _, y in line]
    assert heights[0] > heights[1] > heights[2] > TOP and heights[0] < HEIGHT
    assert abs(heights[0] - 2 * heights[1] + heights[2]) < 0.2, "a straight line stays straight"


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show() -> None:
    svg = figure(Plot("kl", {"kl": {1: 0.0, 2: 1e-3, 3: 1e-2, 4: 1e-1}}, logarithmic=True))
    (line,) = points(svg)
    assert len(line) == 3 and abs(line[0][1] - 2 * line[1][1] + line[2][1]) < 0.2
    assert re.search(r">\d\.\de-0\d<", svg)


def test_long_curves_are_thinned_and_nan_is_left_out() -> None:
    curve = dict.fromkeys(range(10 * MOST_POINTS), 1.0) | {5: float("nan")}
    (line,) = points(figure(Plot("x", {"x": curve})))
    assert 100 < len(line) <= MOST_POINTS


def test_a_title_may_hold_anything() -> None:
    assert "a &lt; b" in figure(Plot("a < b", {"x": {1: 1.0}}))


def test_there_is_a_plot_for_what_has_two_points(tmp_path: Path) -> None:
    assert set(plots_of(board())) == {"reward", "entropy", "waits"}
    assert plots_of(board(1)) == {}
    files = write_plots(board(), tmp_path / "plots")
    assert {file.name for file in files} == {"reward.svg", "entropy.svg", "waits.svg"}
    assert all(ElementTree.parse(file) for file in files)


def test_two_curves_are_told_apart() -> None:
    svg = figure(Plot("waits", {"one": {1: 1.0, 2: 2.0}, "two": {1: 2.0, 2: 1.0}}))
    assert len(points(svg)) == 2 and ">one<" in svg and ">two<" in svg
