"""Where the run stands: the batch being collected, the version served, and a pulse when either moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from prl.orchestrator.staleness import may_ship


class Pipeline:
    """State that dispatcher, sink, watcher and main loop share. All of it lives on one event loop.

    `step`: batch being collected (1-based). `version`: policy that every engine serves (applied, not merely
    published). `updating`: the engines are changing weights, so nothing may start. `draining`: no rollout is
    wanted any more.
    """

    def __init__(self, step: int, version: int) -> None:
        self.step = step
        self.version = version
        self.updating = False
        self.draining = False
        self._pulse = asyncio.Event()
        self._blocked_since: float | None = None
        self._blocked_seconds = 0.0
        self._last_event = 0.0

    def notify(self) -> None:
        """Wake everyone who waits: something happened that a condition may depend on."""
        self._last_event = asyncio.get_running_loop().time()
        self._count_blocked(self._last_event)
        self._pulse.set()
        self._pulse = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Sleep until the next `notify`, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pulse.wait()

    async def until(self, condition: Callable[[], bool], patience: float, what: str) -> None:
        """Sleep until `condition()`. Raises TimeoutError once nothing happened for `patience` seconds."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while not condition():
            quiet = clock() - max(since, self._last_event)
            if quiet >= patience:
                raise TimeoutError(
                    f"{what}: nothing happened for {quiet:.0f} s (batch {self.step}, v{self.version} served)"
                )
            await self.wait(patience - quiet)

    def take_blocked_seconds(self) -> float:
        """Seconds since the last call in which the policy was too old to start or ship the batch at hand.

        The closed gate and the ship hold are one condition here, so no second is counted twice.
        """
        self._count_blocked(asyncio.get_running_loop().time())
        seconds, self._blocked_seconds = self._blocked_seconds, 0.0
        return seconds

    def _count_blocked(self, now: float) -> None:
        if self._blocked_since is not None:
            self._blocked_seconds += now - self._blocked_since
        self._blocked_since = None if may_ship(self.step, self.version) else now
