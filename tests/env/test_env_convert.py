"""Records from wire episodes that no healthy rollout gives: forks, compaction, failures, odd rewards."""

from __future__ import annotations

from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.episode import WireEpisode

from prl.env.convert import convert_episode, failed_episode, find_fault, mark_failed
from prl.records import Episode, Trace, TraceError

TASK = {"type": "T", "data": {"prompt": "p", "answer": "a"}, "key": "k", "hash": "h"}


def node(role: str, parent: int | None, tokens: int, **fields: Any) -> dict[str, Any]:
    """A message of `tokens` tokens; an assistant's first one is the generation prompt."""
    message = fields.pop("message", {"role": role, "content": f"{role} says"})
    if role == "tool":
        message = {**message, "tool_call_id": "c"}
    sampled = role == "assistant"
    mask = [sampled and i > 0 for i in range(tokens)]
    base = {
        "token_ids": list(range(tokens)),
        "mask": mask,
        "is_content": mask,
        "logprobs": [-0.5] * sum(mask),
    }
    return {"parent": parent, "message": message, "sampled": sampled, **base, **fields}


def trace(nodes: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    base = {"task": TASK, "agent": {"config": {}}, "ok": True, "is_completed": True, "nodes": nodes}
    return {**base, "rewards": {"r": {"score": 1.0, "weight": 1.0}}, **fields}


def record(*traces: dict[str, Any], **fields: Any) -> Episode:
    wire = WireEpisode.model_validate({"task": TASK, "ok": True, "traces": list(traces), **fields})
    return convert_episode(wire, env="e", group_id="g", task={"prompt": "p"}, started_at=1.0)


def converted(nodes: list[dict[str, Any]], **fields: Any) -> Trace:
    return record(trace(nodes, **fields)).traces[0]


TURN = [node("user", None, 2), node("assistant", 0, 3)]


def test_a_fork_gives_two_branches_that_share_nodes() -> None:
    result = converted([*TURN, node("user", 1, 2), node("assistant", 2, 4), node("tool", 1, 1)])
    assert result.branches == [[0, 1, 2, 3], [0, 1, 4]]
    assert result.num_turns == 2
    assert result.num_sampled == 2 + 3


def test_equal_looking_messages_are_told_apart() -> None:
    twin = node("user", None, 2)
    result = converted([*TURN, twin, node("assistant", 2, 3)])
    assert result.branches == [[0, 1], [2, 3]]


def test_an_abandoned_compaction_is_not_a_branch() -> None:
    attempt = node("assistant", 0, 3, semantic_parents=[{"node": 1, "type": "compaction_attempt"}])
    result = converted([*TURN, attempt])
    assert result.branches == [[0, 1]]
    assert len(result.nodes) == 3


def test_rewards_are_weighted_and_sum_up() -> None:
    rewards = {"a": {"score": 1.0, "weight": 0.25}, "b": {"score": -2.0, "weight": 1.0}}
    result = converted(TURN, rewards=rewards, metrics={"m": 3.0}, info={"demonstration": "d"})
    assert result.rewards == {"a": 0.25, "b": -2.0}
    assert result.reward == -1.75
    assert result.metrics == {"m": 3.0} and result.info == {"demonstration": "d"}


def test_content_is_text_and_tool_calls() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "re"}, {"type": "text", "text": "verse"}]}
    call = {"id": "c", "name": "add", "arguments": '{"a": 1}'}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = converted([node("user", None, 2, message=parts), node("assistant", 0, 3, message=calls)])
    assert [n.content for n in result.nodes] == ["reverse", 'add({"a": 1})']


def test_without_attribution_is_content_is_absent() -> None:
    result = converted([node("user", None, 2, is_content=[]), node("assistant", 0, 3, is_content=[])])
    assert [n.is_content for n in result.nodes] == [None, None]


def test_limits_are_truncations() -> None:
    assert converted(TURN, stop_condition="max_turns").is_truncated
    assert not converted(TURN, stop_condition="agent_completed").is_truncated


def overflow() -> list[dict[str, Any]]:
    message = "Prompt length (600) exceeds maximum context length (512)."
    return [{"error": {"type": "ProviderError", "message": message, "status_code": 400}}]


def test_a_context_that_runs_out_is_a_truncation() -> None:
    result = converted(TURN, calls=overflow(), stop_condition="agent_completed")
    assert (result.is_truncated, result.stop_condition, result.error) == (True, "prompt_too_long", None)


def test_a_first_prompt_that_does_not_fit_is_an_error() -> None:
    result = converted([], calls=overflow())
    assert result.error is not None and result.error.type == "PromptTooLong"


def test_a_failed_trace_keeps_its_last_error_and_has_no_reward() -> None:
    errors = [{"type": "ProviderError", "message": "first"}, {"type": "TaskError", "message": "last"}]
    result = converted(TURN, ok=False, errors=errors)
    assert result.error == TraceError("TaskError", "last")
    assert result.reward is None and not result.trainable


def test_an_unscored_reward_is_an_error() -> None:
    result = converted(TURN, rewards={"r": None, "s": {"score": 1.0}})
    assert result.error == TraceError("MissingReward", "no value from: r")
    assert result.rewards == {"r": None, "s": 1.0}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_an_error(value: float) -> None:
    result = converted(TURN, rewards={"r": {"score": value}})
    assert result.error is not None and result.error.type == "NonFiniteReward"


def test_a_turn_without_tokens_is_an_error_unless_text_is_all_that_was_asked_for() -> None:
    textual = [node("user", None, 0), node("assistant", 0, 0)]
    result = converted(textual)
    assert result.error is not None and result.error.type == "NoTokens"
    assert find_fault(result, text_only=True) is None


def test_a_frozen_seat_needs_no_tokens() -> None:
    agent = {"config": {}, "trainable": False, "name": "judge"}
    result = converted([node("user", None, 0), node("assistant", 0, 0)], agent=agent)
    assert (result.agent, result.error, result.trainable) == ("judge", None, False)


def test_an_episode_that_fails_as_a_whole_marks_its_traces() -> None:
    errors = [{"type": "EnvError", "message": "finalize() raised"}]
    episode = record(trace(TURN), trace(TURN), ok=False, errors=errors)
    assert [t.error for t in episode.traces] == [TraceError("EnvError", "finalize() raised")] * 2


def test_an_episode_without_traces_has_one_for_its_error() -> None:
    episode = record(ok=False, errors=[{"type": "EnvError", "message": "run() raised"}])
    (only,) = episode.traces
    assert only.error == TraceError("EnvError", "run() raised")
    assert only.nodes == [] and only.reward is None


def test_one_failed_seat_keeps_its_own_error() -> None:
    failed = trace(TURN, ok=False, errors=[{"type": "ProviderError", "message": "x"}])
    episode = record(failed, trace(TURN), ok=False)
    assert [t.error and t.error.type for t in episode.traces] == ["ProviderError", None]
    mark_failed(episode, TraceError("EpisodeFailed"))
    assert [t.error and t.error.type for t in episode.traces] == ["ProviderError", "EpisodeFailed"]


def test_a_rollout_that_never_came_back() -> None:
    error = TraceError("RolloutTimeout", "no end after 5 s")
    common = {"env": "e", "group_id": "g", "task_key": "k", "task": {"prompt": "p"}, "started_at": 1.0}
    first, second = failed_episode(error, **common), failed_episode(error, **common)
    assert first.id != second.id and first.traces[0].id != second.traces[0].id
    assert first.traces[0].error == error and first.task_key == "k"
    assert first.finished_at > first.started_at == 1.0


def test_seconds_per_stage() -> None:
    timing = {
        "setup": {"start": 1.0, "end": 1.5},
        "agent": {"start": 2.0, "end": 6.0, "model": {"duration": 3.0}, "harness": {"duration": 1.0}},
    }
    result = converted(TURN, timing=timing).timing
    assert (result["setup"], result["agent"], result["agent/model"], result["agent/harness"]) == (
        0.5,
        4,
        3,
        1,
    )
    assert result["boot"] == 0.0 and result["total"] == 4.5


def test_the_overflow_words_are_those_that_the_client_writes() -> None:
    from renderers import OverlongPromptError

    from prl.env.overflow import is_overflow

    assert is_overflow(str(OverlongPromptError(prompt_len=600, max_prompt_len=512)))
    assert not is_overflow("Error code: 400 - bad request")


def test_the_wire_is_verifiers_own() -> None:
    """The fixtures above pass through the model that the client validates replies with."""
    assert vf.WireTrace is WireEpisode.model_fields["traces"].annotation.__args__[0]
