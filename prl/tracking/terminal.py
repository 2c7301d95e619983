"""What every view on the terminal is made of: plain lines, a picture that redraws, a thread that looks.

A thread of its own does the looking: a terminal that blocks must not stop the supervisor.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TextIO, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class Notes(Protocol):
    """A view that says things and can be left."""

    def note(self, text: str) -> None:
        """A message that stays."""

    def close(self) -> None: ...


class PlainNotes:
    """Lines below each other."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)

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
            self._view.note(text)

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
