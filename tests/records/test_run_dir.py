"""Where things of a run lie, and how processes tell each other their addresses."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from pathlib import Path

import pytest

from prl.run_dir import RunDir, write_atomic


def test_the_resolved_config_leads_back_to_its_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "mine", attempt=3)
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text("command: rl\n")
    assert RunDir.from_resolved(run.resolved_config) == RunDir((tmp_path / "mine").resolve(), 3)


def test_each_attempt_has_its_own_configs_and_logs(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path, 1), RunDir(tmp_path, 2)
    assert first.configs != second.configs and first.log_file("trainer/0") != second.log_file("trainer/0")
    assert first.metric_file("trainer") == second.metric_file("trainer")


def test_a_published_address_reaches_who_waits_for_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    timer = threading.Timer(0.1, run.publish_address, ("env/reverse_text", "tcp://127.0.0.1:4"))
    timer.start()
    assert asyncio.run(run.wait_for_address("env/reverse_text", 10)) == "tcp://127.0.0.1:4"
    timer.join()
    assert json.loads(run.address_file("env/reverse_text").read_text())["pid"] == os.getpid()


def test_waiting_ends(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match="inference published no address within 0 s"):
        RunDir(tmp_path).wait_for_address_blocking("inference", 0.0)


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.json"
    write_atomic(path, "old and long")
    write_atomic(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]
