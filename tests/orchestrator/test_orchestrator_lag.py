"""The lag of the event loop."""

from __future__ import annotations

import asyncio
import time

from prl.orchestrator.lag import LagProbe


def test_a_blocked_loop_shows() -> None:
    async def scenario() -> dict[str, float]:
        probe = LagProbe()
        assert probe.metrics() == {}, "nothing is known before the first probe"
        task = asyncio.create_task(probe.run())
        await asyncio.sleep(0.05)
        time.sleep(0.4)  # noqa: ASYNC251 - the block that must be seen
        await asyncio.sleep(0.25)
        task.cancel()
        return probe.metrics()

    values = asyncio.run(scenario())
    assert values["event_loop_lag/max"] > 0.2 and values["event_loop_lag/n"] >= 2
    assert (
        0 <= values["event_loop_lag/min"] <= values["event_loop_lag/median"] <= values["event_loop_lag/p99"]
    )
    assert set(values) == {
        f"event_loop_lag/{name}" for name in ("min", "mean", "median", "p90", "p99", "max", "n")
    }
