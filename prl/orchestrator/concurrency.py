"""How many rollouts may be in flight: as many as the engines' memory for keys and values holds.

Additive-increase-like growth while the engines are calm, multiplicative cuts when they run out of memory
(preemptions) or queue. Where an engine tells nothing of its memory, the number stays as it began.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Protocol

from prl.orchestrator.engine_load import EngineLoad

PERMIT_SECONDS = 15.0
"""How long a calm look at the engines allows growth."""
COOLDOWN_POLLS = 6
QUEUED_SHARE, QUEUED_POLLS = 0.5, 6
CALM_USAGE, FULL_USAGE, OVERFULL_USAGE, TRIMMED_USAGE = 0.6, 0.8, 0.9, 0.7
GROWTH = 1.25
"""Growth of the cap over as many completions as are in flight."""
BUSY_SHARE = 0.9
"""Only a cap that is used is worth raising."""

CLEAR, SOFT, HARD = 0, 1, 2


class Limit(Protocol):
    """What the dispatcher asks before a start and tells after an end."""

    @property
    def cap(self) -> int: ...

    def finished(self, tokens: int, inflight: int) -> None: ...


class FixedLimit:
    """Always the same number."""

    def __init__(self, cap: int) -> None:
        self.cap = cap

    def finished(self, tokens: int, inflight: int) -> None:
        """Nothing depends on it."""


class AdaptiveLimit:
    """AIMD over the engines' memory.

    `low`, `high`: bounds of the cap (`high` None: no ceiling). `initial`: where it starts; None = what the
    memory holds of contexts of `context` tokens, once known, and `fallback` until then and where it never is.
    `inflight()` counts rollouts in flight; `shed(n)` cancels the n youngest of training.
    """

    def __init__(
        self,
        *,
        low: int,
        high: int | None,
        initial: int | None,
        fallback: int,
        context: int,
        inflight: Callable[[], int],
        shed: Callable[[int], object],
    ) -> None:
        self._low, self._high = low, math.inf if high is None else high
        self._sized = initial is not None
        self._cap = self._bounded(fallback if initial is None else initial)
        self._context = context
        self._inflight = inflight
        self._shed = shed
        self._capacity = 0.0
        self._permit_until = -math.inf
        self._preemptions: float | None = None
        self._waited = self._queued = 0
        self._polls = 0
        self._last_cut = -COOLDOWN_POLLS
        self._last_trim = -COOLDOWN_POLLS
        self._draining = False
        self._usage = 0.0
        self._signal = CLEAR
        self._ended = 0

    @property
    def cap(self) -> int:
        return int(self._cap)

    def finished(self, tokens: int, inflight: int) -> None:
        """A rollout of `tokens` ended; `inflight` counts it in. Grows the cap if growth is allowed."""
        self._ended += 1
        allowed = asyncio.get_running_loop().time() < self._permit_until
        if allowed and tokens > 0 and inflight >= BUSY_SHARE * self._cap:
            self._cap = self._bounded(self._cap * GROWTH ** (1 / inflight))

    def look(self, loads: Sequence[EngineLoad]) -> None:
        """Judge the engines; called at every poll."""
        self._polls += 1
        self._capacity = sum(load.capacity or 0.0 for load in loads)
        if not self._capacity:
            self._signal, self._permit_until = CLEAR, -math.inf
            return
        if not self._sized:
            self._sized = True
            self._cap = self._bounded(self._capacity / self._context)
        preempted, overloaded = self._read(loads)
        inflight = self._inflight()
        if self._draining and inflight <= self._cap and self._signal == CLEAR:
            self._draining = False
        self._react(preempted, overloaded, inflight)
        calm = self._signal == CLEAR and not self._waited and not self._draining
        now = asyncio.get_running_loop().time()
        self._permit_until = now + PERMIT_SECONDS if calm else -math.inf

    def take_metrics(self) -> dict[str, float]:
        """`concurrency/*`; `turnover`: rollouts that ended since the last call, per rollout of the cap."""
        ended, self._ended = self._ended, 0
        return {
            "concurrency/max_inflight": self.cap,
            "concurrency/turnover": ended / self.cap,
            "concurrency/capacity": self._capacity,
            "concurrency/signal": self._signal,
        }

    def _read(self, loads: Sequence[EngineLoad]) -> tuple[bool, bool]:
        """(an engine preempted, the engines' queue is too long); sets the signal."""
        total = sum(load.preemptions for load in loads)
        preempted = self._preemptions is not None and total > self._preemptions
        self._preemptions = total
        running, waiting = sum(load.running for load in loads), sum(load.waiting for load in loads)
        self._waited = self._waited + 1 if waiting else 0
        self._queued = self._queued + 1 if waiting > QUEUED_SHARE * running else 0
        self._usage = max(load.usage for load in loads)
        overloaded = self._queued >= QUEUED_POLLS
        soft = self._waited >= 2 or self._usage > CALM_USAGE
        self._signal = HARD if preempted or overloaded else SOFT if soft else CLEAR
        return preempted, overloaded

    def _react(self, preempted: bool, overloaded: bool, inflight: int) -> None:
        if self._draining:
            return
        if preempted or overloaded:
            again = self._polls - self._last_cut <= COOLDOWN_POLLS
            factor = 0.5 if again else 0.8 if preempted else 0.9
            self._lower(factor * inflight)
            self._last_cut, self._draining, self._queued = self._polls, True, 0
        elif self._usage > FULL_USAGE and self._polls - self._last_trim >= COOLDOWN_POLLS:
            self._last_trim = self._polls
            self._lower(inflight * TRIMMED_USAGE / self._usage)
            if self._usage > OVERFULL_USAGE and inflight > self.cap:
                self._shed(inflight - self.cap)

    def _lower(self, cap: float) -> None:
        self._cap = self._bounded(min(self._cap, cap))

    def _bounded(self, cap: float) -> float:
        return min(max(cap, self._low), self._high)
