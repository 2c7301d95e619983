"""`prl sft` from the command line: killed and resumed, evaluated while it trains, and handed to RL."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

SMALL = ["data.batch_size=2", "trainer.seq_len=128", "tracking=none", "log.display=plain"]
EXACT = ("loss/mean", "optim/lr", "optim/grad_norm", "progress/num_samples", "progress/num_tokens")


def start(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    environment.pop("PRL_OUTPUT_DIR", None)
    command = [sys.executable, "-m", "prl", *words]
    return subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def prl(tmp_path: Path, *words: str, timeout: float = 600) -> str:
    process = start(tmp_path, *words)
    out = process.communicate(timeout=timeout)[0]
    assert process.returncode == 0, out
    return out


def rows(run: Path, producer: str = "trainer") -> list[dict]:
    lines = (run / "metrics" / f"{producer}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def exact(run: Path) -> dict[int, list[float]]:
    """The last word on every step."""
    return {row["step"]: [row[key] for key in EXACT] for row in rows(run) if "loss/mean" in row}


def kill_trainer(process: subprocess.Popen[str], run: Path, after_step: int) -> None:
    """SIGKILL for the trainer once it has logged `after_step`."""
    deadline = time.monotonic() + 600
    stream = run / "metrics" / "trainer.jsonl"
    while not stream.exists() or max((row.get("step") or 0 for row in rows(run)), default=0) < after_step:
        assert time.monotonic() < deadline, "the run is stuck"
        assert process.poll() is None, f"it ended before it was killed: {process.communicate()[0]}"
        time.sleep(0.05)
    for child in psutil.Process(process.pid).children(recursive=True):
        if "sft/0" in child.cmdline():
            child.send_signal(signal.SIGKILL)


def test_a_killed_run_resumes_to_the_same_numbers_and_rl_starts_from_it(tmp_path: Path) -> None:
    words = ["sft", *SMALL, "max_steps=40", "ckpt=interval", "ckpt.interval=5"]
    killed = start(tmp_path, *words, "run.name=killed")
    run = tmp_path / "outputs" / "killed"
    kill_trainer(killed, run, 12)
    out = killed.communicate(timeout=120)[0]
    assert killed.returncode == 1 and "SIGKILL" in out
    prl(tmp_path, *words, "run.name=killed", "run.resume=latest", "data.workers=1")
    prl(tmp_path, *words, "run.name=whole")
    assert exact(run) == exact(tmp_path / "outputs" / "whole")
    assert sorted(exact(run)) == list(range(1, 41))

    small = ["rollout.batch_size=16", "rollout.group_size=8", "tracking=none", "log.display=plain"]
    out = prl(tmp_path, f"model.path={run}", "run.name=rl", "max_steps=2", *small)
    assert "finished at step 2" in out
    log = (tmp_path / "outputs" / "rl" / "logs" / "latest" / "trainer" / "0.log").read_text()
    assert str(tmp_path / "outputs" / "rl" / "initial_model") in log
    assert not (run / "weights").exists() and not list(run.glob("checkpoints/*/weights"))
    rewards = [
        row["train/agg/all/agent/reward/mean"]
        for row in rows(tmp_path / "outputs" / "rl", "orchestrator")
        if "train/agg/all/agent/reward/mean" in row
    ]
    assert rewards[0] > 0.5, "the bundled model gets 0.05; it was taught the brackets"
