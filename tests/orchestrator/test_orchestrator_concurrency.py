"""Rollouts in flight follow the engines' memory: growth, cuts, trims; and what is done without word of it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from orchestrator_fakes import FakeEnv, Scenario, run_virtual

from prl.orchestrator.concurrency import AdaptiveLimit, FixedLimit
from prl.orchestrator.engine_load import EngineLoad

CALM = EngineLoad(running=10, usage=0.3, capacity=64_000)


class Bench:
    def __init__(self, **kwargs: Any) -> None:
        self.inflight = 0
        self.shed: list[int] = []
        values = {"low": 1, "high": None, "initial": None, "fallback": 16, "context": 1000}
        self.limit = AdaptiveLimit(
            **{**values, **kwargs}, inflight=lambda: self.inflight, shed=self.shed.append
        )

    def look(self, inflight: int | None = None, **load: Any) -> int:
        """One poll; the cap after it."""
        self.inflight = self.limit.cap if inflight is None else inflight
        self.limit.look([EngineLoad(**{"running": 10, "usage": 0.3, "capacity": 64_000, **load})])
        return self.limit.cap


def run(scenario: Coroutine[Any, Any, Any]) -> Any:
    return run_virtual(scenario)


def test_p11_without_word_of_the_memory_the_number_stays_and_is_no_minimum() -> None:
    async def scenario() -> None:
        it = Bench()
        assert it.limit.cap == 16
        for loads in ([], [EngineLoad(running=16, waiting=500, usage=1.0)]):
            it.limit.look(loads)
            it.limit.finished(100, 16)
            assert it.limit.cap == 16 and it.shed == []
        assert it.limit.take_metrics()["concurrency/capacity"] == 0

    run(scenario())


@pytest.mark.parametrize(
    ("bounds", "expected"), [({}, 64), ({"high": 40}, 40), ({"initial": 24}, 24), ({"low": 100}, 100)]
)
def test_it_starts_with_what_the_memory_holds(bounds: dict[str, Any], expected: int) -> None:
    async def scenario() -> None:
        assert Bench(**bounds).look(inflight=0) == expected

    run(scenario())


def test_a_full_and_calm_cap_grows_by_a_quarter_over_as_many_completions() -> None:
    async def scenario() -> None:
        it = Bench()
        it.look()
        for _ in range(20):
            it.limit.finished(50, 64)
        assert it.limit.cap == int(64 * 1.25 ** (20 / 64)) == 68
        for _ in range(100):
            it.limit.finished(50, 60)
            it.limit.finished(0, 68)
        assert it.limit.cap == 68, "neither while it is not used nor for rollouts that sampled nothing"

    run(scenario())


def test_permission_to_grow_lapses_and_needs_calm() -> None:
    async def scenario() -> None:
        it = Bench()
        it.look()
        await asyncio.sleep(16)
        it.limit.finished(50, 64)
        assert it.limit.cap == 64
        for trouble in ({"waiting": 1}, {"usage": 0.65}):
            it.look()
            it.look(**trouble)
            for _ in range(200):
                it.limit.finished(50, 64)
            assert it.limit.cap == 64, trouble

    run(scenario())


def test_preemptions_cut_to_four_fifths_once_until_it_has_drained_then_to_half() -> None:
    async def scenario() -> None:
        it = Bench()
        it.look(preemptions=5)
        assert it.look(preemptions=6) == 51 and it.limit.take_metrics()["concurrency/signal"] == 2
        assert it.look(inflight=60, preemptions=7) == 51, "still draining"
        assert it.look(inflight=51, preemptions=7) == 51
        assert it.look(inflight=51, preemptions=7) == 51
        assert it.look(inflight=50, preemptions=8) == 25, "again so soon"
        assert it.shed == []

    run(scenario())


def test_a_queue_counts_only_when_it_lasts() -> None:
    async def scenario() -> None:
        it = Bench()
        assert [it.look(waiting=6) for _ in range(6)] == [64] * 5 + [57]
        assert it.limit.take_metrics()["concurrency/signal"] == 2

    run(scenario())


def test_a_memory_nearly_full_is_trimmed_and_an_overfull_one_sheds() -> None:
    async def scenario() -> None:
        it = Bench()
        it.look()
        assert it.look(usage=0.85) == 52 and it.shed == []
        assert it.look(inflight=52, usage=0.95) == 52, "a trim is given time"
        for _ in range(4):
            it.look(inflight=52, usage=0.95)
        assert it.look(inflight=52, usage=0.95) == 38 and it.shed == [14]

    run(scenario())


def test_a_cut_never_raises_the_cap() -> None:
    async def scenario() -> None:
        it = Bench()
        it.look(preemptions=0)
        assert it.look(inflight=500, preemptions=1) == 64

    run(scenario())


def test_equal_bounds_pin_it() -> None:
    async def scenario() -> None:
        it = Bench(low=8, high=8)
        it.look(preemptions=0)
        assert it.look(preemptions=3) == 8
        it.look()
        it.limit.finished(10, 8)
        assert it.limit.cap == 8

    run(scenario())


def test_a_fixed_limit_is_fixed() -> None:
    limit = FixedLimit(3)
    limit.finished(10, 3)
    assert limit.cap == 3


def test_shedding_takes_the_youngest_and_the_groups_train_with_the_rest() -> None:
    async def scenario() -> None:
        env = FakeEnv(seconds=lambda n: 10.0)
        it = Scenario(env, cap=4, max_steps=2, group_size=4, batch_size=4)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(1)
        it.dispatcher.shed(1)
        await asyncio.sleep(0.01)
        assert env.cancelled == 1 and it.dispatcher.inflight == 4, "its place is taken by another group"
        assert [call.task_key for call in env.calls] == ["a0"] * 4 + ["a1"]
        await task
        assert it.recorder.of_step(1)["train/agg/all/cancelled/mean"] > 0

    run(scenario())


def test_tasks_per_minute_spaces_groups_not_rollouts() -> None:
    async def scenario() -> None:
        env = FakeEnv(seconds=lambda n: 1e6)
        it = Scenario(env, cap=100, batch_size=100, group_size=3, tasks_per_minute=120.0)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(5.2)
        assert len(env.calls) == 11 * 3, "one group every half second"
        assert all(call.at == pytest.approx(0.5 * (i // 3), abs=0.01) for i, call in enumerate(env.calls))
        task.cancel()
        await asyncio.wait({task})

    run(scenario())
