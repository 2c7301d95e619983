"""What the terminal shows while an evaluation goes on: a bar a source, or a plain line now and then."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from prl.evals.progress import Count, Progress, progress_file
from prl.run_dir import RunDir
from prl.tracking.terminal import Follower, LivePicture, PlainNotes, is_live, tenths

if TYPE_CHECKING:
    from rich.table import Table

LOOK_SECONDS = 0.5
PLAIN_SECONDS = 10.0
BAR_WIDTH = 30


class View(Protocol):
    """A way to show progress."""

    def show(self, progress: Progress, last: bool) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class EvalDisplay:
    """Shows the progress of a run until `close`, in the way that `log.display` names."""

    def __init__(self, mode: str, run: RunDir, out: TextIO | None = None, form: str = "text") -> None:
        self._path = progress_file(run)
        self._view = make_view(mode, out or sys.stdout, form)
        self._follower = Follower(self._view, self._look, LOOK_SECONDS)
        self.start, self.note = self._follower.start, self._follower.note

    def close(self, timeout: float = 2.0) -> None:
        """A last look, then leave the terminal as it was."""
        self._follower.close(timeout)

    def _look(self, last: bool) -> None:
        progress = Progress.read(self._path)
        if progress is not None:
            with self._follower.lock:
                self._view.show(progress, last)


def make_view(mode: str, out: TextIO, form: str = "text") -> View:
    """The view for live, plain, none or auto (live on a terminal, else plain); lines in `form`."""
    if mode == "none":
        return SilentView(out, form)
    return LiveView(out) if is_live(mode, out) else PlainView(out, form)


class SilentView(PlainNotes):
    """Shows nothing but notes."""

    def show(self, progress: Progress, last: bool) -> None: ...


class PlainView(PlainNotes):
    """A line a source when it is done, and every ten seconds before; as JSON also at every tenth of it."""

    def __init__(self, out: TextIO, form: str = "text") -> None:
        super().__init__(out, form)
        self._shown: dict[tuple[int, str], tuple[int, float]] = {}

    def show(self, progress: Progress, last: bool) -> None:
        now = time.monotonic()
        for key, count in progress.counts.items():
            done, at = self._shown.get(key, (0, now))
            self._shown.setdefault(key, (0, now))
            news = count.done > done
            tenth = self._json and tenths(done, count.done, count.total) is not None
            if news and (last or tenth or count.done == count.total or now - at >= PLAIN_SECONDS):
                self._shown[key] = (count.done, now)
                told = {"event": "progress", "step": key[0], "source": key[1]}
                self.tell(count_line(*key, count), **told, done=count.done, of=count.total)


class LiveView(LivePicture):
    """Bars that redraw themselves."""

    def show(self, progress: Progress, last: bool) -> None:
        self.draw(picture(progress))


def count_line(step: int, env: str, count: Count) -> str:
    """`reverse_text step 10: 96/128 done, 16 running, 2 errors, mean 0.412`."""
    where = f"{env} step {step}" if step else env
    mean = "no reward yet" if count.mean is None else f"mean {count.mean:.3f}"
    return f"{where}: {count.done}/{count.total} done, {count.running} running, {count.errors} errors, {mean}"


def picture(progress: Progress) -> Table | Any:
    """A bar and the counts of each source that has begun, or what is waited for."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if not progress.counts:
        return Text(progress.note, style="dim")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("source", "", "done", "running", "errors", "mean"):
        table.add_column(heading, justify="left" if heading in ("source", "") else "right", no_wrap=True)
    for (step, env), count in progress.counts.items():
        mean = "" if count.mean is None else f"{count.mean:.3f}"
        bar = ProgressBar(total=max(count.total, 1), completed=count.done, width=BAR_WIDTH)
        name = f"{env} @{step}" if step else env
        table.add_row(name, bar, f"{count.done}/{count.total}", str(count.running), str(count.errors), mean)
    return table
