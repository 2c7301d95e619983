"""`log.format=json` in a real run: every line of every process, and of the launcher on its terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_process_of_a_run_writes_json_lines(tmp_path: Path) -> None:
    words = ["debug=smoke", "max_steps=2", "run.name=r", f"output_dir={tmp_path}", "log.format=json"]
    words += ["log.levels={trainer: debug, orchestrator: warning}", "env.reverse_text.workers=2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "prl", *words], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = lines_of(done.stdout)
    steps = [(line["step"], line["max_steps"]) for line in told if line.get("event") == "step"]
    assert steps == [(1, 2), (2, 2)]
    assert [line["done"] for line in told if line.get("event") == "progress"] == [1, 2]

    logs = tmp_path / "r" / "logs" / "attempt_1"
    found = {str(path.relative_to(logs))[:-4]: lines_of(path.read_text()) for path in logs.rglob("*.log")}
    spoke = {name for name, lines in found.items() if lines}
    assert {"launcher", "inference", "env/reverse_text", "trainer/0"} <= spoke
    for name, lines in found.items():
        assert {line["process"] for line in lines} <= {name}
    assert "DEBUG" in {line["level"] for line in found["trainer/0"]}
    assert {line["level"] for line in found["orchestrator"]} <= {"WARNING", "ERROR"}
