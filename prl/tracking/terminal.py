"""What every view on the terminal is made of: plain lines, a picture that redraws, a thread that looks.

A thread of its own does the looking: a terminal that blocks must not stop the supervisor.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO, TypeVar

from prl.config.schema import LogConfig
from prl.log_lines import event

log = logging.getLogger(__name__)

T = TypeVar("T")


class Notes(Protocol):
    """A view that says things and can be left."""

    def note(self, text: str) -> None:
        """A message that stays."""

    def close(self) -> None: ...


class PlainNotes:
    """Lines below each other: text, or with `form` = json one object each."""

    def __init__(self, out: TextIO, form: str = "text") -> None:
        self._out = out
        self._json = form == "json"

    def note(self, text: str) -> None:
        self._print(event(text) if self._json else text)

    def tell(self, text: str, **fields: Any) -> None:
        """Say what just happened: with the time of day, or with what it means to a program."""
        self._print(event(text, **fields) if self._json else f"{clock()} {text}")

    def _print(self, line: str) -> None:
        print(line, file=self._out, flush=True)

    def close(self) -> None: ...


class LivePicture:
    """A picture that redraws itself, with notes above it."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        console = Console(file=out)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def draw(self, picture: Any) -> None:
        """Show something that rich can render in the place of what was there."""
        self._live.update(picture, refresh=True)

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def is_live(mode: str, out: TextIO) -> bool:
    """Whether `log.display` = `mode` means a picture here: live, or auto on a terminal."""
    return mode == "live" or (mode == "auto" and out.isatty())


def announce(log: LogConfig, text: str, out: TextIO | None = None) -> None:
    """Print what the launcher has to say before and after its display: as text, or as one JSON line where
    the display is no picture and `log.format` is json."""
    stream = out or sys.stdout
    as_json = log.format == "json" and not is_live(log.display, stream)
    try:
        print(event(text) if as_json else text, file=stream, flush=True)
    except OSError as error:  # the reader of the pipe has left; the run goes on to its end
        _keep(text, error)
        if stream is sys.stdout:
            leave_pipe()


def _keep(text: str, error: OSError) -> None:
    """What could not be shown goes to the log."""
    log.warning("%s (not shown: %s)", text, error)


def leave_pipe() -> None:
    """Standard output goes nowhere from now on: the interpreter would fail on what is left to write."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def tenths(before: int, now: int, total: int | None) -> int | None:
    """The tenth of `total` that was reached on the way from `before` to `now` (3: 30 %); None if none was."""
    if not total or now * 10 // total == before * 10 // total:
        return None
    return now * 10 // total


class Follower:
    """Calls `look(last)` every `seconds` on a thread until `close`; `view` is used under one lock."""

    def __init__(self, view: Notes, look: Callable[[bool], None], seconds: float) -> None:
        self._view = view
        self._look = look
        self._seconds = seconds
        self._stop = threading.Event()
        self.lock = threading.Lock()
        self._thread = threading.Thread(target=self._follow, name="display", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def note(self, text: str) -> None:
        """Say something that stays on the terminal; may be called from any thread."""
        with self.lock:
            try:
                self._view.note(text)
            except OSError as error:
                _keep(text, error)

    def close(self, timeout: float) -> bool:
        """A last look, then leave the terminal as it was; False if the thread hangs in the terminal."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _follow(self) -> None:
        try:
            while not self._stop.wait(self._seconds):
                self._look(False)
            self._look(True)
            self._view.close()
        except OSError as error:  # the terminal or the pipe is gone; the run is not
            log.warning("nothing more is shown: %s", error)


def track(items: Sequence[T], what: str, out: TextIO | None = None) -> Iterator[T]:
    """The items, with a bar of how many are done on a terminal, and nothing elsewhere."""
    stream = out or sys.stderr
    if not stream.isatty() or not items:
        yield from items
        return
    from rich.console import Console
    from rich.progress import track as rich_track

    yield from rich_track(items, description=what, console=Console(file=stream), transient=True)


def clock() -> str:
    """The time of day, as plain lines begin with it."""
    return time.strftime("%H:%M:%S")
