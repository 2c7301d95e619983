"""Two environments, an evaluation, a bound on staleness, batches through files, and a server that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

OVERRIDES = [
    "run.name=acc",
    "env=[reverse_text,arithmetic]",
    "eval.env=[reverse_text]",
    "eval.select.limit=4",
    "eval.interval=3",
    "eval.sampling.max_tokens=13",
    "rollout.max_off_policy_steps=2",
    "rollout.batch_size=16",
    "rollout.group_size=8",
    "rollout.transport=filesystem",
    "max_steps=8",
    "log.display=plain",
    "tracking=none",
]
PATIENCE = 300.0


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_run_with_two_environments_and_an_evaluation_survives_a_dead_server(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("PRL_OUTPUT_DIR", None)
    command = [sys.executable, "-m", "prl", *OVERRIDES]
    run = tmp_path / "outputs" / "acc"
    stream = run / "metrics" / "orchestrator.jsonl"
    server = run / "configs" / "attempt_1" / "addresses" / "env" / "arithmetic.json"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        deadline = time.monotonic() + PATIENCE
        while not any("off_policy/max" in row for row in rows(stream)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        first = json.loads(server.read_text())
        os.kill(first["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    second = json.loads(server.read_text())
    assert second["pid"] != first["pid"], "the server was started again"
    found = rows(stream)
    ages = [row["off_policy/max"] for row in found if "off_policy/max" in row]
    assert len(ages) == 8 and max(ages) <= 2
    prefix = "eval/reverse_text/"
    evals = [row for row in found if "eval/reverse_text/policy_version" in row]
    assert [(row["step"], row[f"{prefix}policy_version"]) for row in evals] == [
        (0, 0),
        (3, 3),
        (6, 6),
        (8, 8),
    ]
    assert all(row[f"{prefix}coverage"] == 1 and f"{prefix}all/agent/avg@1" in row for row in evals)
    used = {name for row in found for name in row if name.startswith("batch/")}
    assert used == {"batch/reverse_text", "batch/arithmetic"}
    assert list((run / "batches").glob("step_8/rank_0.bin"))
    index = rows(run / "traces" / "index.jsonl")
    assert sum(row["kind"] == "eval" for row in index) == 16
