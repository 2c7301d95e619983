"""`model.path=<a run>`: the weights of its newest checkpoint become the model that this run begins with."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import Any

from prl.model_path import newer_checkpoint
from prl.run_dir import RunDir

DIRECTORY = "initial_model"
EXPORT = """
import sys
from prl.checkpoint.export import run
from prl.config.schema import ExportConfig
sys.exit(run(ExportConfig(run=sys.argv[1], out=sys.argv[2])))
"""


def settle_initial_model(config: Any, run: RunDir) -> None:
    """Export the checkpoint that `config.model.path` stands for, if any, and point the config at the result.

    The copy lies in the run's own directory, so that a resume finds the same weights whatever becomes of the
    other run. A process of its own writes it: the launcher stays without torch. Raises ValueError on failure.
    """
    checkpoint, out = newer_checkpoint(config.model), run.path / DIRECTORY
    if checkpoint is None:
        return
    if not (out / "config.json").is_file():
        command = [sys.executable, "-c", EXPORT, str(checkpoint), str(out)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(out.with_name(f".{DIRECTORY}.tmp"), ignore_errors=True)
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"model.path = {config.model.path}: {checkpoint} cannot be exported: {reason}")
    config.model.path = str(out)
