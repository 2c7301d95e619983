"""`tracking_process.py <run directory> <status>`: a process with a run of its own in the store beside it."""

import sys
from pathlib import Path

from tracking_lab import append_line, make_facts

from prl.tracking import mlflow_writer
from prl.tracking.mlflow_store import find_store
from prl.tracking.mlflow_writer import MlflowWriter

PATIENCE = 1800.0
"""The machine may be busy: each of four imports MLflow, and one makes the store while three wait."""


def main(path: Path, status: str) -> int:
    mlflow_writer.NICENESS = 0  # beside other work, whoever makes the store would keep the others waiting
    facts = make_facts(path)
    append_line(facts.run, 1, loss=0.5)
    writer = MlflowWriter(facts, find_store(None, path.parent), print, interval=0.1)
    writer.start()
    return 0 if writer.close(status, PATIENCE) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
