from __future__ import annotations

import io
import threading
import time

import pytest

from prl.tracking.terminal import Follower, PlainNotes, is_live, track


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
