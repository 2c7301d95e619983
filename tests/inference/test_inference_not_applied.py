"""A run whose engine answers but keeps its old weights stops by itself, and says what it found."""

import json
import os
import subprocess
import sys

import pytest

SABOTAGE = """
import sys
if "launchers.role" in sys.orig_argv and "inference" in sys.orig_argv:
    from prl.inference.receiver import WeightReceiver
    WeightReceiver.apply = lambda self, directory: None
"""


@pytest.mark.e2e
def test_weights_that_are_not_applied_end_the_run(tmp_path):
    """v0 is what the engine loaded itself, so the first update that matters is v1."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "sitecustomize.py").write_text(SABOTAGE)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(place), *sys.path])}
    words = ["run.name=kept", "max_steps=5", "rollout.batch_size=16", "rollout.group_size=8"]
    done = subprocess.run(
        [sys.executable, "-m", "prl", *words, "tracking=none", "log.display=plain"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "not the same weights" in done.stderr
    lines = (tmp_path / "outputs" / "kept" / "metrics" / "orchestrator.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    proofs = {row["step"]: row["sync/fingerprint_ok"] for row in rows if "sync/fingerprint_ok" in row}
    assert proofs == {0: 1.0, 1: 0.0}
