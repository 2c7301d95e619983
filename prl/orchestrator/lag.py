"""How late the event loop runs: every blocking call shows here."""

from __future__ import annotations

import asyncio
import statistics
from collections import deque

from prl.orchestrator.metrics import percentile

PROBE_SECONDS = 0.1
WINDOW = 1000


class LagProbe:
    """Sleeps a little, again and again, and notes by how much it overslept (seconds)."""

    def __init__(self) -> None:
        self._lags: deque[float] = deque(maxlen=WINDOW)

    async def run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + PROBE_SECONDS
            await asyncio.sleep(PROBE_SECONDS)
            self._lags.append(max(0.0, clock() - due))

    def metrics(self) -> dict[str, float]:
        """`event_loop_lag/*` over the last probes; empty before the first."""
        ordered = sorted(self._lags)
        if not ordered:
            return {}
        values = {
            "min": ordered[0],
            "mean": statistics.fmean(ordered),
            "median": statistics.median(ordered),
            "p90": percentile(ordered, 0.9),
            "p99": percentile(ordered, 0.99),
            "max": ordered[-1],
            "n": len(ordered),
        }
        return {f"event_loop_lag/{name}": value for name, value in values.items()}
