"""What the terminal shows while a run goes on: a live table, or one plain line a step."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TextIO

from prl.tracking.board import Board, Row
from prl.tracking.progress import outlook
from prl.tracking.reader import MetricTails
from prl.tracking.terminal import Follower, LivePicture, PlainNotes, is_live, tenths

if TYPE_CHECKING:
    from rich.console import Group

REFRESH_SECONDS = 0.5
LIVE_ROWS = 12
BAR_WIDTH = 30


class View(Protocol):
    """A way to show the board."""

    def show(self, board: Board, finished: list[Row]) -> None:
        """The board after a look; `finished` are the steps trained since the last one."""

    def note(self, text: str) -> None:
        """A message that stays."""

    def close(self) -> None: ...


class Display:
    """Shows the metrics below `metrics` until `close`, in the way that `log.display` names."""

    def __init__(
        self,
        mode: str,
        metrics: Path,
        max_steps: int | None,
        out: TextIO | None = None,
        form: str = "text",
    ) -> None:
        self._tails = MetricTails(metrics)
        self.board = Board(max_steps)
        self._view = make_view(mode, out or sys.stdout, form)
        self._follower = Follower(self._view, self._look, REFRESH_SECONDS)
        self.note = self._follower.note

    def start(self) -> None:
        self.board.update(self._tails.read())  # what earlier attempts did is not news
        self._follower.start()

    def close(self, timeout: float = 2.0) -> None:
        """A last look at the streams, then leave the terminal as it was."""
        if self._follower.close(timeout):
            self.board.update(self._tails.read())  # a view that failed did not look

    def _look(self, last: bool) -> None:
        finished = self.board.update(self._tails.read())
        with self._follower.lock:
            self._view.show(self.board, finished)


def make_view(mode: str, out: TextIO, form: str = "text") -> View:
    """The view for live, plain, none or auto (live on a terminal, else plain); lines in `form`."""
    if mode == "none":
        return SilentView(out, form)
    return LiveView(out) if is_live(mode, out) else PlainView(out, form)


class SilentView(PlainNotes):
    """Shows nothing but notes."""

    def show(self, board: Board, finished: list[Row]) -> None: ...


class PlainView(PlainNotes):
    """One line a step; as JSON also one whenever another tenth of the run is done."""

    def show(self, board: Board, finished: list[Row]) -> None:
        for row in finished:
            text = f"step {row.step}/{board.max_steps or '∞'}  {plain_line(row)}"
            self.tell(text, event="step", max_steps=board.max_steps, **asdict(row))
            tenth = tenths(row.step - 1, row.step, board.max_steps)
            if self._json and tenth is not None:
                self.tell(f"{tenth}0 %", event="progress", done=row.step, of=board.max_steps)


class LiveView(LivePicture):
    """A table of the newest steps that redraws itself."""

    def __init__(self, out: TextIO) -> None:
        self._started = time.monotonic()
        super().__init__(out)

    def show(self, board: Board, finished: list[Row]) -> None:
        self.draw(live_picture(board, time.monotonic() - self._started))


@dataclass(frozen=True)
class Column:
    """One watched value: its heading, its text for a row (None: not known), and if the live table has it."""

    heading: str
    text: Callable[[Row], str | None]
    live: bool = True


def _number(heading: str, name: str, form: str, live: bool = True) -> Column:
    def text(row: Row) -> str | None:
        value = getattr(row, name)
        return None if value is None else form.format(value)

    return Column(heading, text, live)


COLUMNS = (
    _number("reward", "reward", "{:.3f}"),
    _number("spread", "spread", "{:.3f}"),
    _number("loss", "loss", "{:.4f}"),
    _number("entropy", "entropy", "{:.3f}"),
    _number("mismatch KL", "mismatch_kl", "{:.1e}"),
    _number("grad norm", "grad_norm", "{:.2f}", live=False),
    _number("stale", "off_policy", "{:.0f}"),
    _number("truncated", "truncated", "{:.0%}", live=False),
    _number("errors", "errors", "{:.0%}"),
    _number("tokens/s", "tokens_per_second", "{:,.0f}"),
    _number("time", "step_time", "{:.1f}s"),
    Column("waits", lambda row: row.waits),
)
"""What nobody tells in a kind of run (rewards in sft) is not shown."""


def plain_line(row: Row) -> str:
    """`reward 0.412  spread 0.210  …`: what is known of a step."""
    texts = ((column.heading, column.text(row)) for column in COLUMNS)
    return "  ".join(f"{heading} {text}" for heading, text in texts if text is not None)


def _live_columns(rows: list[Row]) -> list[Column]:
    """What fits into 80 columns: the loss gives way to the reward, which says more where there is one."""
    known = [column for column in COLUMNS if column.live and any(column.text(row) for row in rows)]
    rewarded = any(row.reward is not None for row in rows)
    return [column for column in known if not (rewarded and column.heading == "loss")]


def live_picture(board: Board, seconds: float) -> Group:
    """The newest steps as a table, and a line that says how far the run is and how long it took."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    rows = [board.rows[step] for step in sorted(board.rows)[-LIVE_ROWS:]]
    columns = _live_columns(rows)
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("step", *(column.heading.replace(" ", "\n") for column in columns)):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        cells = [column.text(row) or "" for column in columns]
        table.add_row(str(row.step), *cells, style="" if row.trained else "dim")
    state = f"step {board.trained_step}/{board.max_steps or '∞'}" if rows else "starting"
    told = Text(f"{state}  {seconds // 60:.0f}:{seconds % 60:02.0f}{outlook(board)}", style="dim")
    if not rows or not board.max_steps:
        return Group(table, told)
    foot = Table.grid(padding=(0, 1))
    foot.add_row(ProgressBar(total=board.max_steps, completed=board.trained_step, width=BAR_WIDTH), told)
    return Group(table, foot)
