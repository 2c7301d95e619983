"""Groups to credit to the queue, and out of it by age and order."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from orchestrator_fakes import (
    FakeCurriculum,
    FakeEnv,
    FakeGrpo,
    Scenario,
    build_sample,
    inline,
    make_episode,
    run_virtual,
)

from prl.orchestrator.episodes import Group, Outcome
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.sink import Sink
from prl.records import Episode, PolicySpan


class Bench:
    def __init__(
        self, *, batch_size: int = 4, bound: int = 2, constant: bool = True, refused: Any = ()
    ) -> None:
        self.line = Pipeline(1, 0)
        self.curriculum = FakeCurriculum("a", refused)
        self.mixer = TaskMixer({"a": self.curriculum}, {"a": 1.0}, 0)
        self.grpo = FakeGrpo()
        self.recorded: list[str] = []
        self.inbox: asyncio.Queue[Outcome] = asyncio.Queue()
        self.sink = Sink(
            {"a": self.grpo}, {"a": self.curriculum}, build_sample, self.mixer, self.line,
            batch_size=batch_size, bound=bound, constant=constant, offload=inline,
            record=lambda episode: self.recorded.append(episode.id),
        )  # fmt: skip
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Bench:
        self._task = asyncio.create_task(self.sink.run(self.inbox))
        return self

    async def __aexit__(self, *_: Any) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def group(
        self, *rewards: float | str | None, start: int | list[int] = 0, cancelled: int = 0
    ) -> Group:
        """Send a group: a string is an error, a number a reward. `start`: version(s) of the episodes."""
        draw = self.mixer.draw()
        group = Group(f"1-{draw.index}", draw, len(rewards) + cancelled, 0)
        starts = start if isinstance(start, list) else [start] * len(rewards)
        for reward, version in zip(rewards, starts, strict=True):
            error = reward if isinstance(reward, str) else None
            value = None if isinstance(reward, str) else reward
            episode = make_episode(draw.task.key, value, group_id=group.id, error=error)
            episode.policy = PolicySpan(version, max(version, self.line.version))
            await self.sink.arrive(episode)
            self.inbox.put_nowait(Outcome(group, episode))
        for _ in range(cancelled):
            self.inbox.put_nowait(Outcome(group, None))
        await asyncio.sleep(0.01)
        return group

    def take(self, step: int) -> list[str] | None:
        batch = self.sink.take(step)
        return None if batch is None else [entry.group.draw.task.key for entry in batch]

    @property
    def owed(self) -> list[str]:
        return [draw["key"] for draw in self.mixer.state_dict()["pending"]]


def in_bench(test: Any, **kwargs: Any) -> Any:
    async def scenario() -> Any:
        async with Bench(**kwargs) as it:
            return await test(it)

    return run_virtual(scenario())


def test_a_batch_is_the_oldest_traces_and_the_rest_stays() -> None:
    async def test(it: Bench) -> None:
        for _ in range(3):
            await it.group(1.0, 0.0)
        assert it.take(1) == ["a0", "a0", "a1", "a1"] and it.sink.queued == 2
        assert it.take(1) is None

    in_bench(test)


def test_a_group_is_scored_once_and_whole() -> None:
    async def test(it: Bench) -> None:
        group = await it.group(1.0, 0.0, 1.0)
        assert [len(ids) for ids in it.grpo.groups] == [3] and len(it.grpo.scored) == 3
        assert [len(told) for told in it.curriculum.told] == [3]
        assert len(it.recorded) == 3 and group.size == 3

    in_bench(test)


def test_an_incomplete_group_waits() -> None:
    async def test(it: Bench) -> None:
        draw = it.mixer.draw()
        group = Group("1-0", draw, 3, 0)
        for reward in (0.0, 1.0):
            it.inbox.put_nowait(Outcome(group, make_episode(draw.task.key, reward)))
        await asyncio.sleep(1)
        assert it.grpo.groups == [] and it.sink.queued == 0
        it.inbox.put_nowait(Outcome(group, None))
        await asyncio.sleep(1)
        assert [len(ids) for ids in it.grpo.groups] == [2], "the cancelled member counts as accounted for"

    in_bench(test)


def test_partial_groups_train_with_the_survivors() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, "Timeout", 0.0, cancelled=1)
        assert it.take(1) is None and it.sink.queued == 2
        (ids,) = it.grpo.groups
        assert len(ids) == 2, "failed members are no part of the baseline"
        report = it.sink.window.groups[0]
        assert report.cancelled == 1 and len(report.episodes) == 3
        assert it.sink.window.errors() == {"Timeout": 1}

    in_bench(test)


def test_a_group_without_survivors_is_dropped_and_the_curriculum_told() -> None:
    async def test(it: Bench) -> None:
        await it.group("Boom", "Boom")
        assert it.grpo.groups == [] and it.sink.queued == 0
        assert len(it.curriculum.told) == 1 and it.owed == []

    in_bench(test)


def test_a_group_cancelled_whole_tells_nobody() -> None:
    async def test(it: Bench) -> None:
        await it.group(cancelled=2)
        assert it.curriculum.told == [] and it.owed == [] and it.sink.window.cancelled == 2

    in_bench(test)


def test_a_refused_group_is_not_queued() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 0.0)
        await it.group(1.0, 0.0)
        assert it.sink.queued == 2 and it.owed == ["a1"]

    in_bench(test, refused=["a0"])


def test_constant_batches_count_only_traces_with_credit() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 1.0)
        await it.group(0.0, 1.0)
        assert it.sink.queued == 2 and it.owed == ["a1"]
        await it.group(0.0, 1.0)
        assert it.take(1) == ["a1", "a1", "a2", "a2"]

    in_bench(test)


def test_shrinking_batches_count_all_and_prune_after_the_cut() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 1.0)
        await it.group(0.0, 1.0)
        batch = it.sink.take(1)
        assert batch is not None and len(batch) == 4
        assert [bool(entry.built.samples) for entry in batch] == [False, False, True, True]

    in_bench(test, constant=False)


def test_b4_staleness_is_judged_at_consumption_queue_time_included() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 0.0, start=0)
        await it.group(1.0, 0.0, start=1)
        it.line.step, it.line.version = 4, 3
        assert it.take(4) is None, "version 0 is 3 steps old in batch 4, the bound is 2"
        assert it.sink.queued == 2 and it.sink.window.stale == 2 and it.owed == ["a1"]
        await it.group(1.0, 0.0, start=3)
        assert it.take(4) == ["a1", "a1", "a2", "a2"]

    in_bench(test)


def test_staleness_is_judged_per_episode() -> None:
    async def test(it: Bench) -> None:
        it.line.step, it.line.version = 4, 3
        await it.group(1.0, 0.0, 1.0, start=[0, 1, 3])
        assert it.sink.queued == 2 and it.sink.window.stale == 1
        (ids,) = it.grpo.groups
        assert len(ids) == 3, "a stale sibling still tells the others' baseline"

    in_bench(test)


def test_a_group_that_is_stale_whole_is_void() -> None:
    async def test(it: Bench) -> None:
        it.line.step, it.line.version = 5, 4
        await it.group(1.0, 0.0, start=1)
        assert it.grpo.groups == [] and it.curriculum.told == []
        assert it.sink.window.stale == 2 and it.owed == []

    in_bench(test)


def test_the_step_may_move_while_a_group_is_scored() -> None:
    class Slow(FakeGrpo):
        async def score_group(self, episodes: list[Episode]) -> None:
            await super().score_group(episodes)
            await asyncio.sleep(5)

    async def test(it: Bench) -> None:
        it.sink._algorithms = {"a": Slow()}
        await it.group(1.0, 0.0, start=0)
        assert (it.sink.settling, it.sink.queued) == (2, 0)
        it.line.step = 4
        await asyncio.sleep(10)
        assert (it.sink.settling, it.sink.queued) == (0, 0) and it.sink.window.stale == 2

    in_bench(test)


def test_the_step_may_move_while_samples_are_built() -> None:
    async def slowly(function: Any, *args: Any) -> Any:
        await asyncio.sleep(5)
        return function(*args)

    async def test(it: Bench) -> None:
        it.sink._offload = slowly
        await it.group(1.0, 0.0, start=0)
        it.line.step = 4
        await asyncio.sleep(10)
        assert it.sink.queued == 0 and it.sink.window.stale == 2 and it.owed == []

    in_bench(test)


def test_frozen_samples_never_go_stale() -> None:
    async def test(it: Bench) -> None:
        draw = it.mixer.draw()
        group = Group("1-0", draw, 2, 0)
        for reward in (0.0, 1.0):
            it.inbox.put_nowait(Outcome(group, make_episode(draw.task.key, reward)))
        await asyncio.sleep(0.01)
        assert it.take(1000) == ["a0", "a0"]

    in_bench(test, batch_size=2, bound=0)


def test_p16_tasks_are_owed_until_a_batch_uses_them() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 0.0)
        await it.group(1.0, 0.0, 0.0)
        assert it.owed == ["a0", "a1"]
        assert it.take(1) == ["a0", "a0", "a1", "a1"]
        assert it.owed == [], "a group that is shipped in part is used up"

    in_bench(test)


def test_a_stale_rest_settles_its_task() -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 0.0, start=0)
        it.line.step = 9
        it.take(9)
        assert it.owed == [] and it.sink.queued == 0

    in_bench(test)


def test_a_hook_that_raises_ends_the_sink() -> None:
    class Broken(FakeGrpo):
        async def score_group(self, episodes: list[Episode]) -> None:
            raise ZeroDivisionError("hook")

    async def scenario() -> None:
        it = Bench()
        it.sink._algorithms = {"a": Broken()}
        task = asyncio.create_task(it.sink.run(it.inbox))
        await it.group(1.0, 0.0)
        await task

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(scenario())
    assert isinstance(caught.value.exceptions[0], ZeroDivisionError)


def test_scoring_an_episode_needs_a_trainable_trace() -> None:
    async def test(it: Bench) -> None:
        await it.sink.arrive(make_episode("a0", None, error="Boom"))
        await it.sink.arrive(make_episode("a0", 1.0, sampled=0))
        assert it.grpo.scored == [] and len(it.recorded) == 2

    in_bench(test)


def test_a_batch_worth_of_fruitless_rollouts_is_a_warning_with_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(it: Bench) -> None:
        await it.group(1.0, 1.0)
        assert not caplog.records
        await it.group("Boom", 0.0)
        (record,) = caplog.records
        text = record.getMessage()
        assert text.startswith(
            "4 rollouts in a row gave nothing to train on: 1 failed (Boom 1), 3 without credit"
        )
        await it.group(1.0, 1.0)
        await it.group(1.0, 0.0)
        await it.group(1.0, 1.0)
        assert len(caplog.records) == 1, "a group that gave something starts the count anew"

    with caplog.at_level(logging.WARNING):
        in_bench(test)


def test_each_rollout_is_in_exactly_one_window() -> None:
    async def test(it: Bench) -> None:
        draw = it.mixer.draw()
        open_group = Group("1-0", draw, 2, 0)
        it.inbox.put_nowait(Outcome(open_group, make_episode(draw.task.key, 1.0)))
        await it.group(1.0, 0.0)
        first = it.sink.take_window()
        it.inbox.put_nowait(Outcome(open_group, make_episode(draw.task.key, 0.0)))
        await asyncio.sleep(0.01)
        second = it.sink.take_window()
        assert [g.task_key for g in first.groups] == ["a1"] and [g.task_key for g in second.groups] == ["a0"]
        assert second.num_episodes == 2, "a rollout belongs to the window of its group"

    in_bench(test)


@pytest.mark.parametrize("constant", [True, False])
def test_rollouts_that_never_give_credit_end_the_run(constant: bool) -> None:
    with pytest.raises(RuntimeError, match="8 rollouts in a row ended well and none gave credit"):
        run_virtual(Scenario(group_size=1, constant=constant, max_steps=2, max_barren=8).run())


def test_failures_and_late_rollouts_are_no_sign_of_barren_tasks() -> None:
    async def scenario() -> None:
        env = FakeEnv(outcome=lambda n: ConnectionError("down") if n < 60 else float(n % 2))
        it = Scenario(env, max_steps=2, max_barren=8)
        await it.run()
        assert sorted(it.trainer.shipped) == [1, 2]

    run_virtual(scenario())
