"""`prl watch <run>`: the values that matter, their trends, who waits for whom, errors, likely trouble.

On a terminal it redraws until the run ends or Ctrl-C; elsewhere, or with --once, it prints one picture.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prl.monitor.doctor import diagnose
from prl.monitor.observed import Observed, Observer, ending, find_run, silence
from prl.monitor.watched import readings, seconds_left, spoken_time, who_waits

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

REFUSED = 2
BAR_WIDTH = 30
COLOURS = {"down": "bold red", "trouble": "red", "notice": "yellow"}


def main(words: Sequence[str]) -> int:
    """The tool; 0 when it has shown what there is, 2 without a run."""
    parser = argparse.ArgumentParser(prog="prl watch", description=__doc__)
    parser.add_argument("run", help="run directory, or the name of a run in outputs")
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--seconds", type=float, default=2.0, help="time between two pictures")
    options = parser.parse_args(list(words))
    try:
        observer = Observer(find_run(options.run))
    except ValueError as error:
        print(f"watch: {error}", file=sys.stderr)
        return REFUSED
    if options.once or not sys.stdout.isatty():
        _print_once(observer.look())
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        _follow(observer, options.seconds)
    return 0


def _print_once(observed: Observed) -> None:
    from rich.console import Console

    Console(highlight=False).print(picture(observed))


def _follow(observer: Observer, seconds: float) -> None:
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        while True:
            ended = ending(observer.look().run) is not None  # asked first: the last picture tells it too
            live.update(picture(observer.look()), refresh=True)
            if ended:
                return
            time.sleep(seconds)


def picture(observed: Observed) -> Group:
    """All of it, at most 80 columns wide."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [_head(observed), _table(observed)]
    if waits := who_waits(observed):
        parts.append(Text(f"waiting  {waits}"))
    if errors := observed.errors(10):
        told = ", ".join(f"{name} {count}" for name, count in errors.most_common(5))
        parts.append(Text(f"errors   {told} (newest 10 steps)", style="red"))
    for finding in diagnose(observed)[:4]:
        text = f"{finding.name}: {finding.evidence}; try {finding.knob}"
        parts.append(Text(text, style=COLOURS[finding.severity]))
    return Group(*parts)


def state(observed: Observed) -> str:
    """`running`, `silent for 7 min`, or how the run ended."""
    how = ending(observed.run)
    if how is not None:
        return how.lower()
    quiet = silence(observed)
    return "running" if quiet is None else f"silent for {spoken_time(quiet)}"


def _head(observed: Observed) -> Group:
    """Name and state, then the bar of the steps and the time that is left."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    name = Text.assemble((observed.name, "bold"), f"  attempt {observed.run.attempt}  {state(observed)}")
    row: list[Any] = [f"step {observed.step}/{observed.max_steps or '∞'}"]
    if observed.max_steps:
        row.append(ProgressBar(total=observed.max_steps, completed=observed.step, width=BAR_WIDTH))
    left = seconds_left(observed) if ending(observed.run) is None else None
    row += [f"{spoken_time(left)} left"] if left else []
    bar = Table.grid(padding=(0, 1))
    bar.add_row(*row)
    return Group(name, bar)


def _table(observed: Observed) -> Table:
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading, side in (("", "left"), ("now", "right"), ("mean of 10", "right"), ("trend", "left")):
        table.add_column(heading, justify=side, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("healthy", style="dim", no_wrap=True)
    for reading in readings(observed):
        watched = reading.watched
        table.add_row(watched.label, reading.now, reading.mean, reading.trend, watched.healthy)
    return table
