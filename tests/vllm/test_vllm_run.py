"""Whole RL runs of the tiny model on a real vLLM, one for each way that weights travel."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.e2e]

STEPS = 2
SMALL = ["rollout.batch_size=8", "rollout.group_size=4", f"max_steps={STEPS}"]
SMALL += ["log.display=plain", "tracking=none", "cluster.start_timeout=900", "sync.timeout=900"]
SECONDS = 1500


def prl(where: Path, environment: dict[str, str], *overrides: str) -> Path:
    """Run `python -m prl …` to its end; the run directory."""
    command = [sys.executable, "-m", "prl", "run.name=trained", *SMALL, *overrides]
    done = subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return where / "outputs" / "trained"


def rows(run: Path, producer: str) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics" / f"{producer}.jsonl").read_text().splitlines()]


def check(run: Path) -> None:
    """All versions were proven, and what was sampled is what the trainer computes."""
    orchestrator, trainer = rows(run, "orchestrator"), rows(run, "trainer")
    proofs = [row["sync/fingerprint_ok"] for row in orchestrator if "sync/fingerprint_ok" in row]
    assert proofs == [1.0] * (STEPS + 1), "the starting weights and each step's"
    assert all(row["sync/seconds"] > 0 for row in orchestrator if "sync/seconds" in row)
    mismatch = [row["mismatch_kl/all/mean"] for row in trainer if "mismatch_kl/all/mean" in row]
    assert len(mismatch) == STEPS
    assert mismatch[0] < 1e-6, "the first batch is sampled by the weights that train on it"


def test_a_run_starts_vllm_and_sends_files(vllm_python, padded_tiny, prl_environment, tmp_path):
    engine = ["inference=vllm", f"inference.python={vllm_python}", "inference.ready_timeout=900"]
    run = prl(tmp_path, prl_environment, f"model.path={padded_tiny}", *engine, "sync=filesystem")
    check(run)
    assert "vllm" in (run / "configs" / "attempt_1" / "resolved.yaml").read_text()


def test_a_run_broadcasts_to_a_server_that_is_there(server, padded_tiny, prl_environment, tmp_path):
    """`inference=external`: the server of the other tests, started by `prl inference`."""
    external = ["inference=external", f"inference.base_url={server.url}/v1"]
    run = prl(tmp_path, prl_environment, f"model.path={padded_tiny}", *external, "sync=collective")
    check(run)
    assert sorted(entry.name for entry in (run / "broadcasts" / f"step_{STEPS}").iterdir()) == [
        "COMPLETE.json",
        "collective.json",
    ]


def test_a_run_stops_when_the_worker_keeps_its_weights(server, padded_tiny, prl_environment, tmp_path):
    """The server still serves what the run before left it with."""
    server.sabotage.write_text("skip")
    external = ["inference=external", f"inference.base_url={server.url}/v1", "sync=filesystem"]
    command = [sys.executable, "-m", "prl", "run.name=kept", *SMALL, f"model.path={padded_tiny}", *external]
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=prl_environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    finally:
        server.sabotage.unlink()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not the same weights" in done.stderr
    kept = rows(tmp_path / "outputs" / "kept", "orchestrator")
    assert [row["sync/fingerprint_ok"] for row in kept if "sync/fingerprint_ok" in row] == [0.0]
