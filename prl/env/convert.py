"""verifiers' episodes -> prl's records. Works on what the wire carries; imports nothing of verifiers.

Faults that verifiers lets pass as ordinary traces become typed errors here: `EmptyTrajectory` (no turn),
`PromptTooLong` (not even the first prompt fitted), `EmptyCompletion` (a turn without a sampled token),
`NoTokens` (a turn whose tokens were never captured), `MissingReward`, `NonFiniteReward`. Any other error
keeps the name that verifiers gave it; `EpisodeFailed` marks the traces of an episode that failed as a whole.
"""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from prl.env.overflow import is_overflow
from prl.records import Episode, Node, Trace, TraceError

PROMPT_TOO_LONG = "prompt_too_long"
STAGES = ("boot", "setup", "agent", "finalize", "scoring")


def convert_episode(
    wire: Any,
    *,
    env: str,
    group_id: str,
    task: dict[str, Any],
    started_at: float,
    text_only: bool = False,
) -> Episode:
    """The record of a `WireEpisode`. `policy` stays None; `text_only` expects no tokens."""
    episode = Episode(
        id=wire.id,
        env=env,
        group_id=group_id,
        task_key=wire.task.key,
        task=task,
        traces=[convert_trace(trace, text_only) for trace in wire.traces],
        started_at=started_at,
        finished_at=time.time(),
    )
    if not wire.ok and not any(trace.error for trace in episode.traces):
        mark_failed(episode, _last_error(wire) or TraceError("EpisodeFailed"))
    return episode


def failed_episode(
    error: TraceError, *, env: str, group_id: str, task_key: str, task: dict[str, Any], started_at: float
) -> Episode:
    """The record of a rollout that came back with nothing: one empty trace that carries the error."""
    episode_id = uuid.uuid4().hex
    trace = Trace(id=f"{episode_id}-0", agent="agent", nodes=[], branches=[], reward=None, error=error)
    return Episode(episode_id, env, group_id, task_key, task, [trace], None, started_at, time.time())


def mark_failed(episode: Episode, error: TraceError) -> None:
    """Fail every trace that has no error of its own; add one if there is none."""
    if not episode.traces:
        episode.traces = [Trace(f"{episode.id}-0", "agent", nodes=[], branches=[], reward=None)]
    for trace in episode.traces:
        trace.error = trace.error or error


def convert_trace(wire: Any, text_only: bool = False) -> Trace:
    """The record of one agent's run. Branches hold indices of nodes; only trainable ones are kept."""
    index = {id(node): i for i, node in enumerate(wire.nodes)}
    trace = Trace(
        id=wire.id,
        agent=wire.agent.name,
        nodes=[convert_node(node) for node in wire.nodes],
        branches=[[index[id(node)] for node in branch.nodes] for branch in wire.branches if branch.trainable],
        reward=wire.reward if wire.ok else None,
        agent_trainable=wire.agent.trainable,
        rewards={name: reward and reward.value for name, reward in wire.rewards.items()},
        metrics=dict(wire.metrics),
        is_truncated=wire.is_truncated,
        is_completed=wire.is_completed,
        stop_condition=wire.stop_condition,
        num_turns=wire.num_turns,
        timing=_timing(wire.timing),
        info=dict(wire.info),
    )
    if _ran_out_of_context(wire):
        trace.is_truncated, trace.stop_condition = True, PROMPT_TOO_LONG
    trace.error = find_fault(trace, text_only) if wire.ok else _last_error(wire) or TraceError("Error")
    return trace


def convert_node(wire: Any) -> Node:
    """The record of one message with the tokens it adds."""
    return Node(
        parent=wire.parent,
        role=wire.message.role,
        sampled=wire.sampled,
        token_ids=wire.token_ids,
        mask=wire.mask,
        logprobs=wire.logprobs,
        is_content=wire.is_content or None,
        content=_text(wire.message),
    )


def find_fault(trace: Trace, text_only: bool = False) -> TraceError | None:
    """What keeps a trace that verifiers calls good from being used."""
    if trace.num_turns == 0 and trace.stop_condition == PROMPT_TOO_LONG:
        return TraceError("PromptTooLong", "the first prompt exceeds the engine's context")
    if trace.num_turns == 0:
        return TraceError("EmptyTrajectory", "the agent took no turn")
    if missing := [name for name, value in trace.rewards.items() if value is None]:
        return TraceError("MissingReward", f"no value from: {', '.join(missing)}")
    if trace.reward is None or not math.isfinite(trace.reward):
        return TraceError("NonFiniteReward", f"rewards: {trace.rewards}")
    if text_only or not trace.agent_trainable:
        return None
    return next((fault for node in trace.nodes if node.sampled and (fault := _token_fault(node))), None)


def _token_fault(node: Node) -> TraceError | None:
    if not node.token_ids:
        return TraceError("NoTokens", "a turn came back as text; train through /inference/v1/generate")
    if not any(node.mask):
        return TraceError("EmptyCompletion", "the engine returned no token for a turn")
    return None


def _ran_out_of_context(wire: Any) -> bool:
    error = wire.calls[-1].error if wire.calls else None
    return error is not None and is_overflow(error.message)


def _last_error(wire: Any) -> TraceError | None:
    error = wire.last_error
    return TraceError(error.type, error.message, error.status_code) if error else None


def _timing(timing: Any) -> dict[str, float]:
    """Seconds per stage; `agent/model` and `agent/harness` split `agent`."""
    seconds = {stage: getattr(timing, stage).duration for stage in STAGES}
    return {
        **seconds,
        "agent/model": timing.agent.model.duration,
        "agent/harness": timing.agent.harness.duration,
        "total": sum(seconds.values()),
    }


def _text(message: Any) -> str:
    """Text of a message body, tool calls included as the model wrote their names and arguments."""
    content = message.content
    if not isinstance(content, str):
        content = "".join(part.text for part in content or [] if part.type == "text")
    calls = [f"{call.name}({call.arguments})" for call in getattr(message, "tool_calls", None) or []]
    return "\n".join([content, *calls] if content else calls)
