"""What the tracker gets beside the metrics: the table, the plot of rewards, and a sample of traces."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prl.evals.ledger import STREAM, read_rows, records_at
from prl.evals.results import Results
from prl.evals.tables import table_rows
from prl.run_dir import RunDir
from prl.tracking.mlflow_run import run_id_file
from prl.tracking.mlflow_store import Store, locked, quieten_mlflow

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

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
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"
    import mlflow
    from mlflow.tracking import MlflowClient

    mlflow.set_tracking_uri(store.uri)  # traces go to the process's store, whatever the client says
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
        traces = [send_trace(client, client.get_run(run_id).info.experiment_id, record) for record in records]
        if traces:
            client.link_traces_to_run(traces, run_id)


def sample_records(run: RunDir, count: int = SAMPLES, seed: int = 0) -> list[dict[str, Any]]:
    """A random sample of the rollouts that ended well, the same every time."""
    lines = sorted(row.line for row in read_rows(run).values() if row.ok)
    chosen = random.Random(seed).sample(lines, min(count, len(lines)))
    return records_at(run.traces / STREAM, chosen)


def send_trace(client: MlflowClient, experiment: str, record: dict[str, Any]) -> str:
    """One episode as an MLflow trace: a span an agent, below it a span a reply. Returns the trace's id."""
    tags = {"env": record["env"], "task_key": record["task_key"], "step": str(record["step"])}
    rewards = {trace["agent"]: trace["reward"] for trace in record["traces"]}
    root = client.start_trace(
        record["env"],
        inputs={"prompt": record["task"].get("prompt")},
        tags=tags,
        experiment_id=experiment,
        start_time_ns=int(record["started_at"] * 1e9),
    )
    for trace in record["traces"]:
        agent = client.start_span(trace["agent"], root.trace_id, root.span_id, span_type="AGENT")
        for messages, reply in turns(trace["nodes"]):
            span = client.start_span(
                "reply", root.trace_id, agent.span_id, span_type="CHAT_MODEL", inputs={"messages": messages}
            )
            client.end_span(root.trace_id, span.span_id, outputs={"content": reply})
        outcome = {name: trace[name] for name in ("reward", "rewards", "metrics", "stop_condition")}
        client.end_span(root.trace_id, agent.span_id, outputs=outcome)
    client.end_trace(
        root.trace_id, outputs={"rewards": rewards}, end_time_ns=int(record["finished_at"] * 1e9)
    )
    return root.trace_id


def turns(nodes: list[dict[str, Any]]) -> list[tuple[list[dict[str, str]], str]]:
    """(messages before it, text) of every sampled reply."""
    found = []
    for node in nodes:
        if node["sampled"]:
            before: list[dict[str, str]] = []
            parent = node["parent"]
            while parent is not None:
                above = nodes[parent]
                before.insert(0, {"role": above["role"], "content": above["content"]})
                parent = above["parent"]
            found.append((before, node["content"]))
    return found
