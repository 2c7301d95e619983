from __future__ import annotations

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from prl.tracking.board import Board, Row
from prl.tracking.display import Display, LiveView, PlainView, SilentView, live_picture, make_view, plain_line
from prl.tracking.reader import Record


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def write_step(metrics: Path, step: int) -> None:
    head = {"step": step, "time": time.time()}
    lines = {
        "orchestrator": {
            "producer": "orchestrator",
            **head,
            "train/agg/effective/agent/reward/mean": step / 10,
        },
        "trainer": {"producer": "trainer", **head, "optim/lr": 1e-4, "entropy/all/mean": 1.25},
    }
    for name, line in lines.items():
        with (metrics / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def wait_for(text: str, out: io.StringIO) -> None:
    deadline = time.monotonic() + 10
    while text not in out.getvalue():
        assert time.monotonic() < deadline, out.getvalue()
        time.sleep(0.02)


def test_the_mode_decides_and_auto_asks_the_terminal() -> None:
    assert isinstance(make_view("auto", io.StringIO()), PlainView)
    assert type(make_view("none", Terminal())) is SilentView
    assert type(make_view("plain", Terminal())) is PlainView
    live = make_view("auto", Terminal())
    assert isinstance(live, LiveView)
    live.close()


def test_one_plain_line_a_step(tmp_path: Path) -> None:
    out = io.StringIO()
    display = Display("plain", tmp_path, 30, out)
    display.start()
    write_step(tmp_path, 1)
    wait_for("step 1/30", out)
    write_step(tmp_path, 2)
    display.close()
    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0].split()[1:] for line in lines] == [["step", "1/30"], ["step", "2/30"]]
    assert lines[1].endswith("reward 0.200  entropy 1.250"), "the last look comes after the end"


def test_steps_of_earlier_attempts_are_not_news_but_count(tmp_path: Path) -> None:
    write_step(tmp_path, 1)
    out = io.StringIO()
    display = Display("plain", tmp_path, None, out)
    display.start()
    write_step(tmp_path, 2)
    display.close()
    assert "step 1/" not in out.getvalue() and "step 2/∞" in out.getvalue()
    assert display.board.rewards() == {1: 0.1, 2: 0.2}


def test_none_shows_notes_only(tmp_path: Path) -> None:
    out = io.StringIO()
    display = Display("none", tmp_path, 30, out)
    display.start()
    write_step(tmp_path, 1)
    display.note("MLflow is away")
    display.close()
    assert out.getvalue() == "MLflow is away\n" and display.board.trained_step == 1


def test_a_terminal_that_goes_away_does_not_stop_the_board(tmp_path: Path) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError("nobody reads")

    display = Display("plain", tmp_path, 30, Gone())
    display.start()
    write_step(tmp_path, 1)
    deadline = time.monotonic() + 10
    while any(thread.name == "display" for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    write_step(tmp_path, 2)
    display.close()
    assert display.board.trained_step == 2


def test_a_plain_line_tells_what_is_known() -> None:
    row = Row(4, reward=0.5, truncated=0.25, off_policy=2.0, mismatch_kl=0.00123, tokens_per_second=12345.6)
    row.wait_for_batch, row.wait_for_policy = 0.25, 1.5
    assert plain_line(row) == (
        "reward 0.500  mismatch KL 1.2e-03  stale 2  truncated 25%  tokens/s 12,346  waits rollouts 1.5s"
    )
    assert plain_line(Row(1)) == ""


def drawn(picture: object) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(picture)
    return out.getvalue()


FULL = {"spread": 0.336, "entropy": 0.361, "mismatch_kl": 2.7e-13, "off_policy": 2.0, "errors": 1.0}
FULL |= {"tokens_per_second": 123456.0, "step_time": 12.3, "wait_for_batch": 10.1}


@pytest.mark.parametrize(
    ("values", "present", "absent"),
    [({"reward": 0.219}, "0.219", "loss"), ({"loss": 4.0511}, "4.0511", "reward")],
)
def test_a_full_row_fits_into_80_columns(values: dict[str, float], present: str, absent: str) -> None:
    board = Board(30)
    board.rows[7] = Row(7, trained=True, **FULL, **values)
    text = drawn(live_picture(board, 1.0))
    assert "…" not in text and present in text and "trainer 10.1s" in text and absent not in text


def test_the_live_table_has_the_newest_rows_and_only_columns_that_are_told() -> None:
    board = Board(30)
    records = [
        Record("orchestrator", s, 0.0, {"train/agg/effective/agent/reward/mean": s / 100})
        for s in range(1, 21)
    ]
    board.update([*records, Record("trainer", 19, 0.0, {"optim/lr": 1e-4, "entropy/all/mean": 1.5})])
    text = drawn(live_picture(board, 75.0))
    assert text.split()[:3] == ["step", "reward", "entropy"]
    assert "0.200" in text and "0.080" not in text and text.endswith("step 19/30  1:15\n")
    assert drawn(live_picture(Board(30), 1.0)).endswith("starting  0:01\n")


def test_the_live_view_redraws_and_keeps_notes(tmp_path: Path) -> None:
    out = Terminal()
    display = Display("live", tmp_path, 30, out)
    display.start()
    write_step(tmp_path, 7)
    wait_for("0.700", out)
    display.note("MLflow is [away]")
    display.close()
    assert "MLflow is [away]" in out.getvalue() and "step 7/30" in out.getvalue()


def test_as_json_each_step_and_each_tenth_is_an_object(tmp_path: Path) -> None:
    out = io.StringIO()
    display = Display("plain", tmp_path, 20, out, form="json")
    display.start()
    display.note("starting trainer/0")
    for step in (1, 2, 3, 4):
        write_step(tmp_path, step)
    wait_for('"step": 4', out)
    display.close()
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert told[0]["message"] == "starting trainer/0"
    steps = [line for line in told if line.get("event") == "step"]
    assert [(line["step"], line["max_steps"], line["reward"]) for line in steps] == [
        (step, 20, step / 10) for step in (1, 2, 3, 4)
    ]
    assert "loss" not in steps[0]  # unknown, so not told
    milestones = [
        (line["message"], line["done"], line["of"]) for line in told if line.get("event") == "progress"
    ]
    assert milestones == [("10 %", 2, 20), ("20 %", 4, 20)]


def test_a_live_picture_is_no_json() -> None:
    live = make_view("auto", Terminal(), "json")
    live.close()
    assert isinstance(live, LiveView)
