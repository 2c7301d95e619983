"""Episodes as MLflow traces: a span an agent, below it a span a reply and a span a tool's answer.

Times of single turns are not recorded, so spans last as long as their episode. Texts are cut.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

TEXT_LENGTH = 8000
"""Longest text of one message, characters."""
MOST_SPANS = 200
"""Replies and tool answers of one episode that get a span; the first ones."""
TABLE_FILE = "traces/sample.json"


def send_traces(client: MlflowClient, uri: str, run_id: str, records: Sequence[dict[str, Any]]) -> list[str]:
    """Send episodes (lines of `traces/stream.jsonl`) and link them to the run; their trace ids."""
    if not records:
        return []
    os.environ["MLFLOW_ENABLE_ASYNC_TRACE_LOGGING"] = "false"  # a tracker that fails must be noticed here
    import mlflow

    mlflow.set_tracking_uri(uri)  # traces go to the store of the process, whatever the client says
    experiment = client.get_run(run_id).info.experiment_id
    ids = [send_trace(client, experiment, record) for record in records]
    client.link_traces_to_run(ids, run_id)
    for trace_id, record in zip(ids, records, strict=True):
        _send_rewards(trace_id, record)
    return ids


def send_trace(client: MlflowClient, experiment: str, record: dict[str, Any]) -> str:
    """One episode; returns the id of its trace."""
    began, ended = int(record["started_at"] * 1e9), int(record["finished_at"] * 1e9)
    root = client.start_trace(
        record["env"],
        inputs={"prompt": cut(record["task"].get("prompt"))},
        tags=tags_of(record),
        experiment_id=experiment,
        start_time_ns=began,
    )
    for trace in record["traces"]:
        agent = client.start_span(
            trace["agent"], root.trace_id, root.span_id, span_type="AGENT", start_time_ns=began
        )
        _send_turns(client, root.trace_id, agent.span_id, trace["nodes"], (began, ended))
        outcome = {name: trace.get(name) for name in ("reward", "rewards", "metrics", "stop_condition")}
        outcome |= {"error": trace.get("error"), "is_truncated": trace.get("is_truncated", False)}
        status = "ERROR" if trace.get("error") else "OK"
        client.end_span(root.trace_id, agent.span_id, outputs=outcome, status=status, end_time_ns=ended)
    status = "ERROR" if any(trace.get("error") for trace in record["traces"]) else "OK"
    client.end_trace(root.trace_id, outputs={"rewards": rewards(record)}, status=status, end_time_ns=ended)
    return str(root.trace_id)


def tags_of(record: dict[str, Any]) -> dict[str, str]:
    """By what traces are found: the step whose metrics they belong to, the policy versions that made them."""
    tags = {"env": record["env"], "task_key": str(record["task_key"]), "step": str(record["step"])}
    tags |= {"group": str(record.get("group", "")), "attempt": str(record.get("attempt", 1))}
    if span := record.get("policy"):
        tags |= {"policy_version": str(span[0]), "policy_version_end": str(span[1])}
    return tags


def rewards(record: dict[str, Any]) -> dict[str, float | None]:
    """Reward by agent."""
    return {trace["agent"]: trace["reward"] for trace in record["traces"]}


def messages_before(nodes: list[dict[str, Any]], node: dict[str, Any]) -> list[dict[str, str]]:
    """The messages that lead to a node."""
    path: list[dict[str, str]] = []
    parent = node["parent"]
    while parent is not None:
        above = nodes[parent]
        path.insert(0, {"role": above["role"], "content": cut(above["content"])})
        parent = above["parent"]
    return path


def cut(text: Any) -> Any:
    """Text of a bounded length; anything else as it is."""
    if isinstance(text, str) and len(text) > TEXT_LENGTH:
        return f"{text[:TEXT_LENGTH]}… ({len(text) - TEXT_LENGTH} more characters)"
    return text


def table_of(records: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """The same episodes as columns of a table: one row a trace, with its last reply."""
    columns: dict[str, list[Any]] = {
        name: [] for name in ("step", "env", "agent", "reward", "prompt", "reply", "turns", "error", "policy")
    }
    for record in records:
        for trace in record["traces"]:
            replies = [node["content"] for node in trace["nodes"] if node["sampled"]]
            error = trace.get("error")
            row = (record["step"], record["env"], trace["agent"], trace["reward"])
            row += (cut(_prompt(record, trace["nodes"])), cut(replies[-1] if replies else ""), len(replies))
            row += (error["type"] if error else None, str(record.get("policy")))
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
    return columns


def _prompt(record: dict[str, Any], nodes: list[dict[str, Any]]) -> str:
    """The last message before the first reply."""
    for node in nodes:
        if node["sampled"]:
            before = messages_before(nodes, node)
            return before[-1]["content"] if before else ""
    prompt = record["task"].get("prompt", "")
    return prompt if isinstance(prompt, str) else str(prompt)


def _send_turns(
    client: MlflowClient, trace_id: str, agent: str, nodes: list[dict[str, Any]], bounds: tuple[int, int]
) -> None:
    shown = [node for node in nodes if node["sampled"] or node["role"] == "tool"][:MOST_SPANS]
    for node in shown:
        name, kind = ("reply", "CHAT_MODEL") if node["sampled"] else ("tool", "TOOL")
        span = client.start_span(
            name,
            trace_id,
            agent,
            span_type=kind,
            inputs={"messages": messages_before(nodes, node)},
            start_time_ns=bounds[0],
        )
        outputs = {"role": node["role"], "content": cut(node["content"])}
        client.end_span(trace_id, span.span_id, outputs=outputs, end_time_ns=bounds[1])


def _send_rewards(trace_id: str, record: dict[str, Any]) -> None:
    """Rewards as assessments: a column of the trace table that can be sorted and filtered."""
    import mlflow
    from mlflow.entities import AssessmentSource

    source = AssessmentSource(source_type="CODE", source_id=record["env"])
    for agent, reward in rewards(record).items():
        if isinstance(reward, int | float):
            name = "reward" if len(record["traces"]) == 1 else f"reward/{agent}"
            mlflow.log_feedback(trace_id=trace_id, name=name, value=float(reward), source=source)
