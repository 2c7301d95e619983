"""What the tracker gets beside the metrics: the table, the plot of rewards, and a sample of traces."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

from prl.evals.ledger import STREAM, read_rows, records_at
from prl.evals.results import Results
from prl.evals.tables import table_rows
from prl.run_dir import RunDir
from prl.tracking.mlflow_run import run_id_file
from prl.tracking.mlflow_store import Store, locked, quieten_mlflow
from prl.tracking.mlflow_traces import send_traces

SAMPLES = 16
FILES = ("results.md", "results.json", "rewards.svg")


def publish(run: RunDir, store: Store, results: Results, timeout: float, say: Callable[[str], None]) -> bool:
    """Send everything to the MLflow run of `run`; True if it arrived. A tracker at fault costs no more."""
    done = threading.Event()

    def work() -> None:
        try:
            _publish(run, store, results)
            done.set()
        except Exception as error:  # whatever the tracker does, the results are on disk
            say(
                f"MLflow lacks the table and the traces of this evaluation: {type(error).__name__}: {error}"[
                    :400
                ]
            )

    thread = threading.Thread(target=work, name="mlflow-report", daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        say(f"MLflow did not take the table and the traces within {timeout:.0f} s; they are in {run.path}")
    return done.is_set()


def _publish(run: RunDir, store: Store, results: Results) -> None:
    quieten_mlflow()
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store.uri)
    run_id = run_id_file(run).read_text().strip()
    records = sample_records(run)
    with locked(store):
        for file in FILES:
            if (run.path / file).exists():
                client.log_artifact(run_id, str(run.path / file))
        heads, *rows = table_rows(results)
        table = {head: [row[index] for row in rows] for index, head in enumerate(heads)}
        client.log_table(run_id, table, "results_table.json")
        send_traces(client, store.uri, run_id, records)


def sample_records(run: RunDir, count: int = SAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """A random sample of the rollouts that ended well, the same every time."""
    lines = sorted(row.line for row in read_rows(run).values() if row.ok)
    chosen = random.Random(seed).sample(lines, min(count, len(lines)))
    return records_at(run.traces / STREAM, chosen)
