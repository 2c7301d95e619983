"""The shared state: waiting for conditions, and the time that the policy was too old."""

from __future__ import annotations

import asyncio

import pytest
from orchestrator_fakes import now, run_virtual

from prl.orchestrator.pipeline import Pipeline


def test_until_wakes_when_the_condition_holds() -> None:
    async def scenario() -> float:
        line = Pipeline(1, 0)

        async def later() -> None:
            await asyncio.sleep(3)
            line.notify()  # nothing changed yet
            await asyncio.sleep(2)
            line.version = 1
            line.notify()

        task = asyncio.create_task(later())
        await line.until(lambda: line.version == 1, 100, "version 1")
        await task
        return now()

    assert run_virtual(scenario()) == pytest.approx(5)


def test_until_gives_up_only_when_nothing_happens() -> None:
    async def scenario() -> float:
        line = Pipeline(4, 1)

        async def busy() -> None:
            for _ in range(5):
                await asyncio.sleep(8)
                line.notify()

        task = asyncio.create_task(busy())
        with pytest.raises(
            TimeoutError, match=r"waiting for v9: nothing happened for 10 s \(batch 4, v1 served\)"
        ):
            await line.until(lambda: False, 10, "waiting for v9")
        await task
        return now()

    assert run_virtual(scenario()) == pytest.approx(50)


def test_an_event_before_the_wait_does_not_shorten_it() -> None:
    async def scenario() -> float:
        line = Pipeline(1, 0)
        line.notify()
        await asyncio.sleep(100)
        with pytest.raises(TimeoutError):
            await line.until(lambda: False, 10, "x")
        return now()

    assert run_virtual(scenario()) == pytest.approx(110)


def test_p10_time_blocked_on_the_policy_is_counted_once() -> None:
    async def scenario() -> list[float]:
        line = Pipeline(3, 0)
        line.notify()
        await asyncio.sleep(5)  # gate closed and batch held at the same time: 5 seconds, not 10
        line.notify()
        await asyncio.sleep(2)
        first = line.take_blocked_seconds()
        await asyncio.sleep(1)
        line.version = 1
        line.notify()
        await asyncio.sleep(50)
        return [first, line.take_blocked_seconds(), line.take_blocked_seconds()]

    assert run_virtual(scenario()) == pytest.approx([7, 1, 0])


def test_wait_ends_after_its_seconds() -> None:
    async def scenario() -> float:
        await Pipeline(1, 0).wait(2.5)
        return now()

    assert run_virtual(scenario()) == pytest.approx(2.5)


def test_the_virtual_clock_finds_deadlocks() -> None:
    async def stuck() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        run_virtual(stuck(), limit=5)
