"""Rollouts through a real environment server: what comes back as a record, and how faults are named."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from env_server_process import ServerProcess, make_config
from fake_engine import END, FakeEngine, last_user

from prl.algo.samples import build_samples
from prl.config import sources
from prl.env.source import EnvSource, Task
from prl.records import Episode, Trace

SAMPLING = {"temperature": 1.0, "max_tokens": 32}


class Rollouts:
    """One connection to the scripted server; runs tasks by their mode."""

    def __init__(self, server: ServerProcess, engine: FakeEngine, **env: Any) -> None:
        config = make_config(scripted_tasks=sources.EnvConfig(**env))
        self.source = EnvSource("scripted_tasks", config.env["scripted_tasks"], config)
        self.address, self.engine = server.address(), engine
        self.tasks = {task.data["mode"]: task for task in self.source.tasks}

    def __call__(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def connected() -> Any:
            await self.source.start(self.address)
            try:
                return await work()
            finally:
                await self.source.close()

        return asyncio.run(connected())

    async def run(self, mode: str, train: bool = True, salt: str | None = "3", **sampling: Any) -> Episode:
        return await self.source.run(
            self.tasks[mode],
            group_id="group",
            base_url=self.engine.base_url,
            model="tiny",
            sampling={**SAMPLING, **sampling},
            train=train,
            cache_salt=salt,
        )

    def episode(self, mode: str, **options: Any) -> Episode:
        return self(lambda: self.run(mode, **options))

    def trace(self, mode: str, **options: Any) -> Trace:
        (trace,) = self.episode(mode, **options).traces
        return trace


@pytest.fixture(scope="module")
def rollouts(scripted_server: ServerProcess, engine: FakeEngine) -> Rollouts:
    return Rollouts(scripted_server, engine)


async def settled(value: Callable[[], int], expected: int) -> int:
    """`value()` once it is what was expected, or after ten seconds."""
    for _ in range(1000):
        if value() == expected:
            break
        await asyncio.sleep(0.01)
    return value()


def text_of(rollouts: Rollouts, ids: list[int]) -> str:
    return rollouts.engine.tokenizer.decode(ids)


def test_a_single_turn_becomes_a_record(rollouts: Rollouts) -> None:
    before = time.time()
    episode = rollouts.episode("single")
    (trace,) = episode.traces
    assert (episode.env, episode.group_id, episode.policy) == ("scripted_tasks", "group", None)
    assert episode.task_key == rollouts.tasks["single"].key
    assert episode.task["mode"] == "single"
    assert before <= episode.started_at <= episode.finished_at <= time.time()
    assert trace.error is None and trace.trainable
    assert (trace.agent, trace.num_turns, trace.stop_condition) == ("agent", 1, "agent_completed")
    assert trace.is_completed and not trace.is_truncated
    assert trace.reward == 0.5 * len("[nis]")
    assert trace.rewards == {"graded": 2.5} and trace.metrics == {"length": 5.0}
    user, assistant = trace.nodes
    assert (user.role, user.sampled, user.content) == ("user", False, "reverse sin")
    assert (assistant.role, assistant.sampled, assistant.content) == ("assistant", True, "[nis]")
    assert (user.parent, assistant.parent, trace.branches) == (None, 0, [[0, 1]])


def test_tokens_masks_and_logprobs_are_aligned(rollouts: Rollouts) -> None:
    user, assistant = rollouts.trace("single").nodes
    assert text_of(rollouts, user.token_ids) == "<|user|>reverse sin<|end|>"
    assert text_of(rollouts, assistant.token_ids) == "<|assistant|>[nis]<|end|>"
    assert not any(user.mask) and user.logprobs == []
    assert assistant.mask == [False] + [True] * 6
    assert assistant.is_content == assistant.mask
    assert user.is_content == [False] + [True] * 11 + [False]
    assert len(assistant.logprobs) == assistant.num_sampled == 6
    assert all(-1.0 <= logprob <= 0.0 for logprob in assistant.logprobs)
    assert len(set(assistant.logprobs)) == 6


def test_logprobs_keep_every_digit(rollouts: Rollouts) -> None:
    rollouts.engine.rng.seed(7)
    (_, assistant) = rollouts.trace("single").nodes
    rollouts.engine.rng.seed(7)
    assert assistant.logprobs == [-rollouts.engine.rng.random() for _ in range(6)]


def test_the_engine_gets_tokens_sampling_and_salt(rollouts: Rollouts) -> None:
    episode = rollouts.episode("single", salt="v12", temperature=0.7, top_k=5)
    (request,) = rollouts.engine.requests
    assert text_of(rollouts, request["token_ids"]) == "<|user|>reverse sin<|end|><|assistant|>"
    assert request["model"] == "tiny" and request["cache_salt"] == "v12"
    sampling = request["sampling_params"]
    assert (sampling["temperature"], sampling["top_k"], sampling["max_tokens"]) == (0.7, 5, 32)
    assert sampling["stop_token_ids"] == [END] and sampling["logprobs"] == 1
    assert request["headers"]["X-Session-ID"] == episode.traces[0].id
    assert request["headers"]["Authorization"] == "Bearer EMPTY"


def test_no_salt_is_sent_for_a_frozen_model(rollouts: Rollouts) -> None:
    rollouts.episode("single", salt=None)
    assert "cache_salt" not in rollouts.engine.requests[0]


def test_five_turns_stay_one_branch(rollouts: Rollouts) -> None:
    """Also when the model writes bytes that no text gives back, and special tokens."""
    replies = iter([[91, 4, 150, END], [200, 201, END], [END], [8, 5, 5, END], [99, END]])
    rollouts.engine.answer = lambda prompt: next(replies)
    trace = rollouts.trace("five_turns")
    assert trace.error is None
    assert trace.num_turns == 5
    assert trace.branches == [list(range(10))]
    path = [token for node in trace.nodes for token in node.token_ids]
    last = rollouts.engine.requests[-1]["token_ids"]
    assert path[: len(last)] == last
    sampled = [
        token for node in trace.nodes for token, on in zip(node.token_ids, node.mask, strict=True) if on
    ]
    assert sampled == [91, 4, 150, END, 200, 201, END, END, 8, 5, 5, END, 99, END]
    for node in trace.nodes:
        node.advantages = [1.0] * node.num_sampled
    built = build_samples(
        trace, env="a", action_loss="rl", temperature=0.7, seq_len=512, min_abs_advantage=0.0
    )
    (sample,) = built.samples
    assert sample.token_ids == path and built.truncated == 0, "five turns are one sample"
    assert [token for token, on in zip(sample.token_ids, sample.mask, strict=True) if on] == sampled
    assert sample.temperatures == [0.7] * len(path)


def test_a_cut_turn_is_closed_and_goes_on_in_the_same_branch(rollouts: Rollouts) -> None:
    trace = rollouts.trace("five_turns", max_tokens=2)
    assert trace.error is None and trace.branches == [list(range(10))]
    assert trace.is_truncated
    assert [node.num_sampled for node in trace.nodes if node.sampled] == [2] * 5
    assert trace.nodes[2].token_ids[0] == END and not trace.nodes[2].mask[0]


def test_two_seats_give_two_traces(rollouts: Rollouts) -> None:
    traces = {trace.agent: trace for trace in rollouts.episode("two_seats").traces}
    assert {name: trace.num_turns for name, trace in traces.items()} == {"agent": 1, "other": 2}
    assert all(trace.trainable for trace in traces.values())


def test_a_frozen_seat_is_not_trainable(rollouts: Rollouts) -> None:
    traces = {trace.agent: trace for trace in rollouts.episode("frozen_seat").traces}
    assert traces["agent"].trainable and not traces["other"].trainable
    assert traces["other"].error is None


def test_special_tokens_earn_nothing(rollouts: Rollouts) -> None:
    """A reply of role tokens decodes to nothing, so it cannot pass for a long answer."""
    rollouts.engine.answer = lambda prompt: [5, 3, 4, 6, 2, END]
    trace = rollouts.trace("single")
    assert trace.error is None and trace.num_sampled == 6
    assert (trace.reward, trace.nodes[-1].content) == (0.0, "")


def test_a_cut_reply_is_truncated(rollouts: Rollouts) -> None:
    trace = rollouts.trace("single", max_tokens=3)
    assert trace.is_truncated and trace.num_sampled == 3 and trace.trainable


@pytest.mark.parametrize(
    ("mode", "error", "words"),
    [
        ("raises", "TaskError", "no such grade"),
        ("none", "TaskError", "NoneType"),
        ("nan", "NonFiniteReward", "graded"),
        ("no_turn", "EmptyTrajectory", "no turn"),
    ],
)
def test_faults_of_the_environment_are_named(rollouts: Rollouts, mode: str, error: str, words: str) -> None:
    trace = rollouts.trace(mode)
    assert trace.error is not None and not trace.trainable
    assert trace.error.type == error and words in trace.error.message


def test_without_rewards_the_reward_is_zero(rollouts: Rollouts) -> None:
    """Distillation needs no rewards."""
    trace = rollouts.trace("no_reward")
    assert (trace.reward, trace.rewards, trace.error) == (0.0, {}, None)


def test_an_empty_completion_is_an_error(rollouts: Rollouts) -> None:
    rollouts.engine.answer = lambda prompt: []
    trace = rollouts.trace("single")
    assert trace.error is not None and trace.error.type == "EmptyCompletion"
    rollouts.engine.answer = lambda prompt: [] if last_user(prompt) == "reverse ab3" else "[x]"
    assert rollouts.trace("five_turns").error == trace.error


def test_an_engine_that_fails_is_an_error_after_retries(rollouts: Rollouts) -> None:
    rollouts.engine.answer = lambda prompt: 500
    trace = rollouts.trace("single")
    assert trace.error is not None and trace.error.type == "ProviderError"
    assert "500" in trace.error.message and trace.reward is None
    assert trace.stop_condition == "provider_error"
    assert len(rollouts.engine.requests) == 3


def test_a_failure_that_passes_is_retried_once(rollouts: Rollouts) -> None:
    replies = iter([503, "[ok]"])
    rollouts.engine.answer = lambda prompt: next(replies)
    trace = rollouts.trace("single")
    assert trace.error is None and trace.num_turns == 1 and trace.nodes[-1].content == "[ok]"


def test_an_unreachable_engine_is_an_error(rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "base_url", "http://127.0.0.1:9/v1")
    trace = rollouts.trace("single")
    assert trace.error is not None and trace.error.type == "ProviderError"


def test_a_prompt_that_does_not_fit_never_reaches_the_engine(rollouts: Rollouts) -> None:
    rollouts.engine.answer = lambda prompt: "x" * 490
    trace = rollouts.trace("five_turns", max_tokens=500)
    assert trace.error is None and trace.trainable
    assert (trace.num_turns, trace.is_truncated, trace.stop_condition) == (1, True, "prompt_too_long")
    assert len(rollouts.engine.requests) == 1


def test_a_rollout_that_takes_too_long_is_cancelled(
    scripted_server: ServerProcess, engine: FakeEngine
) -> None:
    rollouts = Rollouts(scripted_server, engine, timeout=1.0)
    trace = rollouts.trace("hangs")
    assert trace.error is not None and trace.error.type == "RolloutTimeout"
    assert trace.nodes == [] and not trace.trainable


def test_cancelling_the_caller_frees_the_engine(rollouts: Rollouts) -> None:
    rollouts.engine.latency = 30.0

    async def work() -> tuple[int, int, Episode]:
        running = asyncio.create_task(rollouts.run("single"))
        during = await settled(lambda: rollouts.engine.inflight, 1)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        after = await settled(lambda: rollouts.engine.inflight, 0)
        rollouts.engine.latency = 0.0
        return during, after, await rollouts.run("single")

    during, after, next_episode = rollouts(work)
    assert (during, after) == (1, 0)
    assert next_episode.traces[0].error is None


def test_many_rollouts_at_once(rollouts: Rollouts) -> None:
    async def work() -> list[Episode]:
        return await asyncio.gather(*(rollouts.run("single") for _ in range(40)))

    episodes = rollouts(work)
    assert len({episode.id for episode in episodes}) == 40
    assert all(episode.traces[0].trainable for episode in episodes)


def test_a_request_that_the_server_refuses_is_an_error(rollouts: Rollouts) -> None:
    good = rollouts.tasks["single"]
    rollouts.tasks["bad"] = Task(good.key, {"prompt": "no mode"})
    trace = rollouts.trace("bad")
    assert trace.error is not None and trace.error.type == "EnvServerError"
    assert "mode" in trace.error.message


def test_another_task_than_the_one_given_is_refused(rollouts: Rollouts) -> None:
    good = rollouts.tasks["single"]
    rollouts.tasks["swapped"] = Task("another key", good.data)
    with pytest.raises(ValueError, match="was given task another key and ran"):
        rollouts.episode("swapped")


def test_timing_covers_every_stage(rollouts: Rollouts) -> None:
    timing = rollouts.trace("single").timing
    stages = {"boot", "setup", "agent", "finalize", "scoring"}
    assert set(timing) == stages | {"agent/model", "agent/harness", "total"}
    assert timing["total"] == pytest.approx(sum(timing[stage] for stage in stages))
    assert timing["agent"] == pytest.approx(timing["agent/model"] + timing["agent/harness"])
    assert all(seconds >= 0.0 for seconds in timing.values())
