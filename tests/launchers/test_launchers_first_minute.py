"""What a person does in the first minute: change his mind at once, look at the first lines only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import prl.__main__ as program
from prl.config.schema import LogConfig
from prl.tracking.terminal import Follower, PlainNotes, announce

ROOT = Path(__file__).parents[2]


def test_ctrl_c_before_anything_was_started_is_one_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "_run", interrupted)
    assert program.main(["max_steps=1"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job"], ["dry_run=true"]])
def test_who_reads_the_first_lines_only_gets_no_traceback(tmp_path: Path, words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` that has seen enough, without the race
    try:
        done = subprocess.run(
            [sys.executable, "-m", "prl", *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=writer,
            stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (program.UNREAD, "")


def test_another_broken_pipe_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> int:
        raise BrokenPipeError("a socket of the job")

    monkeypatch.setattr(program, "_run", broken)
    monkeypatch.setattr(program, "_reader_left", lambda: False)
    with pytest.raises(BrokenPipeError, match="a socket of the job"):
        program.main(["max_steps=1"])


def test_a_run_goes_on_when_nobody_reads_it_any_more(caplog: pytest.LogCaptureFixture) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    out = os.fdopen(writer, "w")
    announce(LogConfig(), "the plan", out)
    Follower(PlainNotes(out), lambda last: None, 1.0).note("starting")
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == ["the plan", "starting"]
    with pytest.raises(BrokenPipeError):
        out.close()
