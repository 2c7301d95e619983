"""The other process of `prl bench tracking`: mirrors a run's streams to MLflow until its input closes."""

from __future__ import annotations

import sys
from pathlib import Path

from prl.config.compose import compose_job
from prl.run_dir import RunDir
from prl.tracking.facts import Facts
from prl.tracking.mlflow_store import find_store
from prl.tracking.mlflow_writer import MlflowWriter

INTERVAL = 1.0
PATIENCE = 300.0


def main(path: Path) -> int:
    """0 when everything arrived."""
    run = RunDir(path)
    config = compose_job("rl", [f"output_dir={path.parent}", f"run.name={path.name}-source"])
    facts = Facts(run, "rl", config, [])
    writer = MlflowWriter(
        facts, find_store(None, path.parent), lambda text: print(text, file=sys.stderr), INTERVAL
    )
    writer.start()
    sys.stdin.read()
    return int(not writer.close("FINISHED", PATIENCE))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
