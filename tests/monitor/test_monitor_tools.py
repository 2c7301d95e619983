"""`prl watch`, `prl status`, `prl doctor`: what they print, write and return."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from monitor_lab import append, note, observed, write_run
from rich.console import Console

from prl.monitor import doctor, status, watch
from prl.monitor.findings import Finding
from prl.monitor.observed import ending
from prl.monitor.watched import WATCHED, readings, seconds_left, sparkline, spoken_time, who_waits

KL = "mismatch_kl/all/mean"


def drawn(picture: object, width: int = 80) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(picture)
    return out.getvalue()


def test_every_question_of_the_owners_table_is_answered(tmp_path: Path) -> None:
    run = observed(tmp_path, 12)
    questions = {"progress", "truncation", "drift", "collapse", "divergence", "bottleneck"}
    assert questions <= {reading.watched.question for reading in readings(run)}
    text = drawn(watch.picture(run))
    for watched in WATCHED:
        assert watched.label in text
    assert "0.500" in text and "1.0e-04" in text and "0.400" in text, "reward, mismatch KL, entropy"
    assert "trainer 15%, rollouts 10% of the time" in text and "step 12/100" in text and "running" in text


def test_the_picture_fits_into_80_columns_and_names_trouble(tmp_path: Path) -> None:
    errors = {"train/agg/all/agent/error/RolloutTimeout": 3.0, "train/agg/all/has_error/mean": 0.3}
    run = observed(tmp_path, 60, lambda step: errors, lambda step: {"time/wait_for_batch": 1.9})
    text = drawn(watch.picture(run))
    assert max(map(len, text.splitlines())) <= 80 and "…" not in text
    assert "RolloutTimeout 30 (newest 10 steps)" in text and "starving trainer" in text


def test_a_run_that_tells_nothing_yet_can_be_watched(tmp_path: Path) -> None:
    assert "step 0/100" in drawn(watch.picture(observed(tmp_path, 0)))


def test_the_state_of_a_run(tmp_path: Path) -> None:
    assert watch.state(observed(tmp_path / "a")) == "running"
    assert watch.state(observed(tmp_path / "b", status="KILLED")) == "killed"
    assert watch.state(observed(tmp_path / "c", now=1e6)) != "running"


def test_elsewhere_than_on_a_terminal_watch_prints_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 3)
    assert watch.main([str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "\x1b" not in told and told.count("reward") == 1


def test_on_a_terminal_watch_redraws_until_the_run_ends(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "prl", "watch", str(tmp_path), "--seconds", "0.1"],
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(slave)
    told = read_until(master, b"3/100")
    append(tmp_path, "trainer", {"step": 4, "time": time.time(), "optim/lr": 1e-4})
    told += read_until(master, b"4/100")
    note(tmp_path, 1, "ended: FINISHED")
    told += read_until(master, b"finished")
    assert process.wait(120) == 0 and b"\x1b" in told
    os.close(master)


def read_until(master: int, text: bytes) -> bytes:
    told, deadline = b"", time.monotonic() + 120
    while text not in told:
        assert time.monotonic() < deadline, told
        try:
            told += os.read(master, 65536)
        except OSError:  # the other side is gone
            assert text in told, told
    return told


def test_without_a_run_the_tools_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for tool in (watch, status, doctor):
        assert tool.main([str(tmp_path / "nothing")]) == 2
        assert "no run directory" in capsys.readouterr().err


def test_status_prints_and_appends_an_entry_and_never_rewrites(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, 12, training=lambda step: {KL: 2e-4 * 1.5**step})
    before = (tmp_path / "STATUS.md").read_text()
    assert status.main([str(tmp_path)]) == 1 and (tmp_path / "STATUS.md").read_text() == before
    assert status.main([str(tmp_path), "--append"]) == 1
    after = (tmp_path / "STATUS.md").read_text()
    assert after.startswith(before)
    entry = after.removeprefix(before)
    assert re.match(
        r"\n## \d{4}-\d\d-\d\d \d\d:\d\d:\d\d \S+: attempt 1 check-in: Degraded at step 12/100\n", entry
    )
    for words in (
        "- progress: reward 0.500",
        "left",
        "- stability: mismatch KL",
        "entropy 0.400",
        "grad norm 0.5",
    ):
        assert words in entry
    assert "- performance: 1,000 tokens/s, 2.0 s a step" in entry and "- note: growing mismatch KL" in entry
    assert "try rollout.max_off_policy_steps=4" in entry, "it names the knob and turns none"
    assert "Degraded at step 12/100" in capsys.readouterr().out


def test_a_healthy_and_a_finished_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 12, status="FINISHED")
    assert status.main([str(tmp_path), "--append", "--every", "60"]) == 0, (
        "a run that ended is not waited for"
    )
    told = capsys.readouterr().out
    assert "Healthy at step 12/100" in told and "the run is over: FINISHED" in told and "left" not in told
    assert ending(observed(tmp_path / "other").run) is None


@pytest.mark.parametrize(
    ("severities", "health"),
    [
        ((), "Healthy"),
        (("notice",), "Healthy"),
        (("notice", "trouble"), "Degraded"),
        (("down", "trouble"), "Down"),
    ],
)
def test_health(severities: tuple[str, ...], health: str) -> None:
    assert status.health([Finding("x", severity, "", "") for severity in severities]) == health  # type: ignore[arg-type]


def test_status_of_a_run_without_rewards_speaks_of_the_loss(tmp_path: Path) -> None:
    gone = dict.fromkeys(("train/agg/effective/agent/reward/mean",))
    told = status.check_in(observed(tmp_path, 3, lambda step: gone))  # type: ignore[arg-type,return-value]
    assert told.progress.startswith("loss 0.010")
    assert status.check_in(observed(tmp_path / "b", 0)).progress == "no step yet"


def test_what_is_compared_does_not_overlap(tmp_path: Path) -> None:
    reward = "train/agg/effective/agent/reward/mean"
    for steps, told in (
        (1, "reward 0.010 over the newest step, 0.010 over the first"),
        (8, "reward 0.065 over the newest 4 steps, 0.025 over the first"),
        (40, "reward 0.355 over the newest 10 steps, 0.055 over the first"),
    ):
        run = observed(tmp_path / str(steps), steps, lambda step: {reward: step / 100})
        assert status.check_in(run).progress.startswith(told)


@pytest.mark.parametrize(("how", "health"), [("KILLED", "Down"), ("FAILED", "Down"), ("FINISHED", "Healthy")])
def test_a_run_that_was_stopped_is_not_healthy(tmp_path: Path, how: str, health: str) -> None:
    assert status.check_in(observed(tmp_path, 12, status=how)).health == health


def test_doctor_puts_the_gravest_first_and_gives_one_knob_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(
        tmp_path,
        12,
        training=lambda step: {"time/wait_for_batch": 1.9, "loss/mean": None, KL: 2e-4 * 1.5**step},  # type: ignore[dict-item]
    )
    assert doctor.main([str(tmp_path)]) == 1
    told = capsys.readouterr().out
    places = [
        told.index(name) for name in ("loss is not a number", "growing mismatch KL", "starving trainer")
    ]
    assert places == sorted(places) and told.count("\n        try ") == 3
    assert doctor.main([str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [finding["severity"] for finding in found] == ["down", "trouble", "notice"]
    assert all(finding["evidence"] and finding["knob"] for finding in found)


def test_doctor_says_when_nothing_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path, 12)
    assert doctor.main([str(tmp_path)]) == 0
    assert "checks found nothing" in capsys.readouterr().out


def test_the_tools_stay_light(tmp_path: Path) -> None:
    write_run(tmp_path, 3)
    code = f"""
import sys
from prl.__main__ import main
for tool in ("doctor", "status", "watch"):
    main([tool, {str(tmp_path)!r}])
print([name for name in ("torch", "mlflow", "transformers", "verifiers") if name in sys.modules])
"""
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.endswith("[]\n"), told.stdout


def test_small_words() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█" and sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""
    assert [spoken_time(seconds) for seconds in (40, 600, 12600)] == ["40 s", "10 min", "3.5 h"]


def test_what_is_not_told_is_not_guessed(tmp_path: Path) -> None:
    empty = observed(tmp_path, 0)
    assert who_waits(empty) is None and seconds_left(empty) is None and readings(empty) == []
    assert seconds_left(observed(tmp_path / "b", 12)) == 2.0 * 88
