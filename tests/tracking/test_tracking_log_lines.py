from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from prl.config.schema import LogConfig
from prl.log_lines import OWN, dict_config, event, formatter, level_of, read_line, readable
from prl.run_dir import RunDir

JSON = LogConfig(format="json")
HEAD = ["time", "level", "process", "pid", "logger", "message"]


def record(message: str, *words: Any, level: int = logging.INFO, error: Any = None) -> logging.LogRecord:
    return logging.LogRecord("prl.x", level, "x.py", 1, message, words, error)


def broken() -> Any:
    try:
        raise RuntimeError("it\nbroke")
    except RuntimeError:
        return sys.exc_info()


def test_a_record_is_one_flat_object() -> None:
    line = formatter(JSON, "trainer/0").format(record('%d "quoted"\nlines of é', 3))
    assert "\n" not in line
    told = json.loads(line)
    assert list(told) == HEAD and all(not isinstance(value, dict | list) for value in told.values())
    assert (told["level"], told["process"], told["logger"]) == ("INFO", "trainer/0", "prl.x")
    assert told["message"] == '3 "quoted"\nlines of é'
    assert abs(datetime.fromisoformat(told["time"]).timestamp() - record("").created) < 60
    assert datetime.fromisoformat(told["time"]).tzinfo is not None


def test_a_traceback_is_part_of_the_object() -> None:
    line = formatter(JSON, "env/words").format(record("oh", level=logging.ERROR, error=broken()))
    told = json.loads(line)
    assert "\n" not in line and told["exception"].endswith("RuntimeError: it\nbroke")
    read = read_line(line)
    assert read is not None and (read.level, read.text) == ("ERROR", "prl.x oh")
    assert read.more[0] == "Traceback (most recent call last):" and read.more[-1] == "broke"


@pytest.mark.parametrize("log", [LogConfig(), JSON])
def test_what_is_written_is_read_back(log: LogConfig) -> None:
    written = record("words of %s", "one line", level=logging.WARNING)
    read = read_line(formatter(log, "orchestrator").format(written))
    at = datetime.fromtimestamp(written.created)
    assert read is not None
    assert read.clock == at.hour * 3600 + at.minute * 60 + at.second
    assert (read.level, read.text, read.more) == ("WARNING", "prl.x words of one line", ())


@pytest.mark.parametrize(
    ("line", "clock", "level", "text"),
    [
        ("00:01:02 DEBUG prl.x hello", 62, "DEBUG", "prl.x hello"),
        ("WARNING 11-30 01:00:00 [a.py:3] slow", 3600, "WARNING", "[a.py:3] slow"),
        ("(EngineCore pid=7) ERROR 11-30 01:00:00 [a.py:3] no", 3600, "ERROR", "[a.py:3] no"),
        ("[2026-11-30 01:00:00,120] [WARNING] [a.py:3] old", 3600, "WARNING", "[a.py:3] old"),
        ("[W1130 01:00:00.12 a.cpp:3] odd", 3600, "WARNING", "a.cpp:3] odd"),
    ],
)
def test_stamps_of_others_are_read_too(line: str, clock: int, level: str, text: str) -> None:
    read = read_line(line)
    assert read is not None and (read.clock, read.level, read.text) == (clock, level, text)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Traceback (most recent call last):",
        "12:00 no",
        "{'a': 1}",
        '{"level": "INFO"}',
        "{",
        '{"time": 3}',
    ],
)
def test_a_line_without_a_stamp_belongs_to_the_one_above(line: str) -> None:
    assert read_line(line) is None
    assert readable([line]) == [line]


def test_people_read_text() -> None:
    line = formatter(JSON, "sft/0").format(record("oh", level=logging.ERROR, error=broken()))
    shown = readable(["a print", line])
    assert shown[0] == "a print" and shown[1][2] == ":" and shown[1].endswith(" ERROR prl.x oh")
    assert shown[-1] == "broke"


def test_a_process_may_have_a_level_of_its_own() -> None:
    log = LogConfig(level="warning", levels={"trainer": "debug", "trainer/1": "error", "env/words": "info"})
    levels = {name: level_of(log, name) for name in ("trainer/0", "trainer/1", "env/words", "env/sums")}
    assert levels == {"trainer/0": "DEBUG", "trainer/1": "ERROR", "env/words": "INFO", "env/sums": "WARNING"}


def test_what_the_launcher_says_has_its_facts_as_fields() -> None:
    told = json.loads(event("step 3/9", event="step", reward=0.5, loss=None))
    assert told["message"] == "step 3/9" and told["reward"] == 0.5 and "loss" not in told
    assert told["process"] == "launcher"


def test_a_package_that_configures_itself_can_write_the_same_lines() -> None:
    code = (
        "import json, logging, logging.config, sys\n"
        "logging.config.dictConfig(json.loads(sys.argv[1]))\n"
        "logging.getLogger('vllm.engine').warning('slow'); logging.getLogger('vllm').info('chatter')\n"
    )
    words = [sys.executable, "-c", code, json.dumps(dict_config("inference", "vllm", "WARNING"))]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=120)
    (line,) = done.stderr.splitlines()
    told = json.loads(line)
    assert (told["process"], told["logger"], told["message"]) == ("inference", "vllm.engine", "slow")


UNCAUGHT = """
import sys, threading
from prl.config.schema import LogConfig
from prl.log_lines import configure, log_uncaught
configure(LogConfig(format=sys.argv[1]), "trainer/0")
log_uncaught()
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise KeyError("gone")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_what_nothing_caught_is_a_line_too(form: str) -> None:
    words = [sys.executable, "-c", UNCAUGHT, form]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    read = [line for text in done.stderr.splitlines() if (line := read_line(text))]
    assert [(line.level, line.text) for line in read] == [
        ("CRITICAL", "launchers uncaught ZeroDivisionError"),
        ("CRITICAL", "launchers uncaught KeyError"),
    ]
    if form == "json":
        assert len(done.stderr.splitlines()) == 2
        assert read[1].more[-1] == "KeyError: 'gone'"


def test_configure_speaks_for_prl_and_hushes_others(capfd: pytest.CaptureFixture[str]) -> None:
    from prl.log_lines import configure

    root = logging.getLogger()
    kept, level = list(root.handlers), root.level
    try:
        configure(LogConfig(format="json", levels={"env": "debug"}), "env/words")
        logging.getLogger("prl.env").debug("detail")
        logging.getLogger("httpx").info("chatter")
    finally:
        logging.captureWarnings(False)
        root.handlers[:], root.level = kept, level
        for name in OWN:
            logging.getLogger(name).setLevel(logging.NOTSET)
    (line,) = capfd.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "detail" and json.loads(line)["process"] == "env/words"


def test_vllm_is_told_of_json_lines_unless_it_has_a_config_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prl.inference.vllm_server import prepare_logging

    variable, run = "VLLM_LOGGING_CONFIG_PATH", RunDir(tmp_path)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv(variable, "mine.json")
    prepare_logging(JSON, run, "inference")
    assert os.environ[variable] == "mine.json"
    monkeypatch.delenv(variable)
    prepare_logging(LogConfig(), run, "inference")
    assert variable not in os.environ
    prepare_logging(JSON, run, "inference/1")
    written = Path(os.environ.pop(variable))
    assert written.parent == run.configs
    assert json.loads(written.read_text()) == dict_config("inference/1", "vllm", "WARNING")
