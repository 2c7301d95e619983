"""The parent run of a sweep: made once by whichever element comes first, its status told by its children."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

from prl.run_dir import write_atomic

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PARENT_FILE = "mlflow_parent_run_id"
WORST_FIRST = ("RUNNING", "FAILED", "KILLED", "FINISHED")


def join_sweep(client: MlflowClient, experiment: str, sweep: Path) -> str:
    """Id of the sweep's parent run, kept in the sweep's directory; makes the run if there is none yet."""
    sweep.mkdir(parents=True, exist_ok=True)
    with (sweep / f".{PARENT_FILE}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = sweep / PARENT_FILE
        if path.exists():
            parent = path.read_text().strip()
        else:
            made = client.create_run(experiment, tags={"sweep": sweep.name}, run_name=sweep.name)
            parent = made.info.run_id
            write_atomic(path, parent + "\n")
        client.update_run(parent, status="RUNNING")
    return parent


def settle_sweep(client: MlflowClient, parent: str) -> str:
    """Give the parent the status that its children amount to: running, failed, killed or finished."""
    experiment = client.get_run(parent).info.experiment_id
    query = f"tags.`mlflow.parentRunId` = '{parent}'"
    children = client.search_runs([experiment], query, max_results=5000)
    states = {child.info.status for child in children}
    status = next((state for state in WORST_FIRST if state in states), "FINISHED")
    if status == "RUNNING":
        client.update_run(parent, status=status)
    else:
        client.set_terminated(parent, status)
    return status
