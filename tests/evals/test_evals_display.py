"""What the terminal shows, from the file that the role writes."""

from __future__ import annotations

import asyncio
import io
import json
import time
from pathlib import Path

import pytest
from evals_lab import make_run

from prl.evals.display import EvalDisplay, LiveView, PlainView, SilentView, count_line, make_view, picture
from prl.evals.progress import Count, Progress, progress_file


def some() -> Progress:
    return Progress({(0, "a"): Count(8, 4, 2, 1, 1.5, 3), (10, "b"): Count(4)})


def test_progress_comes_back_as_written(tmp_path: Path) -> None:
    progress = some()
    assert Progress.read(tmp_path / "p") is None
    progress.write(tmp_path / "p")
    assert Progress.read(tmp_path / "p") == progress


def test_counts_add_up() -> None:
    count = Count(3)
    assert count.mean is None
    count.add([1.0, 0.0], failed=False)
    count.add([], failed=True)
    assert (count.done, count.errors, count.mean) == (2, 1, 0.5)


def test_writing_goes_on_until_cancelled(tmp_path: Path) -> None:
    async def write() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(some().keep_writing(tmp_path / "p"), 0.3)

    asyncio.run(write())
    assert Progress.read(tmp_path / "p") == some()


def test_lines() -> None:
    assert count_line(0, "a", Count(8, 4, 2, 1, 1.5, 3)) == "a: 4/8 done, 2 running, 1 errors, mean 0.500"
    assert count_line(10, "b", Count(4)) == "b step 10: 0/4 done, 0 running, 0 errors, no reward yet"


def test_plain_tells_when_a_source_is_done_and_never_twice() -> None:
    out = io.StringIO()
    view = PlainView(out)
    progress = Progress({(0, "a"): Count(2)})
    view.show(progress, last=False)
    progress.counts[0, "a"].add([1.0], failed=False)
    view.show(progress, last=False)
    assert out.getvalue() == "", "ten seconds are not over"
    progress.counts[0, "a"].add([0.0], failed=False)
    for last in (False, False, True):
        view.show(progress, last)
    (line,) = out.getvalue().splitlines()
    assert line.endswith("a: 2/2 done, 0 running, 0 errors, mean 0.500")


def test_plain_tells_where_it_stopped() -> None:
    out = io.StringIO()
    PlainView(out).show(some(), last=True)
    assert out.getvalue().count("\n") == 1 and "a: 4/8 done" in out.getvalue()


def test_live_has_a_bar_a_source() -> None:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=100)
    console.print(picture(some()))
    console.print(picture(Progress(note="connecting")))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "4/8" in text and "b @10" in text and "0.500" in text and "━" in text and "connecting" in text


@pytest.mark.parametrize(
    ("mode", "kind"), [("none", SilentView), ("plain", PlainView), ("live", LiveView), ("auto", PlainView)]
)
def test_modes(mode: str, kind: type) -> None:
    view = make_view(mode, io.StringIO())
    assert type(view) is kind
    view.close()


def test_the_display_follows_the_file_and_looks_once_more(tmp_path: Path) -> None:
    run, out = make_run(tmp_path), io.StringIO()
    display = EvalDisplay("plain", run, out)
    display.start()
    display.note("starting")
    Progress({(0, "a"): Count(1, 1, 0, 0, 1.0, 1)}).write(progress_file(run))
    begun = time.monotonic()
    display.close()
    assert time.monotonic() - begun < 2
    assert out.getvalue().startswith("starting\n") and "a: 1/1 done" in out.getvalue()


def test_as_json_every_tenth_of_a_source_is_told() -> None:
    out = io.StringIO()
    view = PlainView(out, "json")
    progress = Progress({(0, "a"): Count(20)})
    view.show(progress, last=False)
    for _ in range(4):
        progress.counts[0, "a"].add([1.0], failed=False)
        view.show(progress, last=False)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [(line["event"], line["source"], line["done"], line["of"]) for line in told] == [
        ("progress", "a", 2, 20),
        ("progress", "a", 4, 20),
    ]
