from __future__ import annotations

import io
import json
import threading
import time

import pytest

from prl.config.schema import LogConfig
from prl.tracking.terminal import Follower, PlainNotes, announce, is_live, tenths, track


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("mode", "out", "live"),
    [
        ("auto", io.StringIO(), False),
        ("auto", Terminal(), True),
        ("live", io.StringIO(), True),
        ("plain", Terminal(), False),
        ("none", Terminal(), False),
    ],
)
def test_what_is_live(mode: str, out: io.StringIO, live: bool) -> None:
    assert is_live(mode, out) is live


def test_a_follower_looks_again_and_again_and_once_more_at_the_end() -> None:
    looks: list[bool] = []
    view = PlainNotes(io.StringIO())
    follower = Follower(view, looks.append, 0.01)
    follower.start()
    deadline = time.monotonic() + 60
    while len(looks) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert follower.close(60) and looks[-1] is True and looks.count(True) == 1 and len(looks) > 3


def test_notes_do_not_mix_with_a_look() -> None:
    out, inside = io.StringIO(), threading.Event()
    follower = Follower(PlainNotes(out), lambda last: None, 0.01)
    follower.lock.acquire()
    thread = threading.Thread(target=lambda: (inside.set(), follower.note("a note")))
    thread.start()
    inside.wait(60)
    time.sleep(0.05)
    assert out.getvalue() == ""
    follower.lock.release()
    thread.join(60)
    assert out.getvalue() == "a note\n"


def test_a_bar_is_for_terminals_only() -> None:
    quiet, terminal = io.StringIO(), Terminal()
    assert list(track([1, 2, 3], "exporting", quiet)) == [1, 2, 3] and quiet.getvalue() == ""
    assert list(track([1, 2, 3], "exporting", terminal)) == [1, 2, 3] and "exporting" in terminal.getvalue()
    assert list(track([], "exporting", terminal)) == []


@pytest.mark.parametrize(
    ("before", "now", "total", "reached"), [(0, 1, 8, 1), (1, 2, 20, 1), (2, 3, 20, None), (19, 20, 20, 10)]
)
def test_tenths_of_a_whole(before: int, now: int, total: int, reached: int | None) -> None:
    assert tenths(before, now, total) == reached
    assert tenths(before, now, None) is None


def test_what_the_launcher_announces_is_json_where_lines_are() -> None:
    plain, screen, text = io.StringIO(), Terminal(), io.StringIO()
    announce(LogConfig(format="json"), "two\nlines", plain)
    announce(LogConfig(format="json"), "two\nlines", screen)  # a live table is beside it
    announce(LogConfig(), "two\nlines", text)
    assert json.loads(plain.getvalue())["message"] == "two\nlines" and plain.getvalue().count("\n") == 1
    assert screen.getvalue() == text.getvalue() == "two\nlines\n"
