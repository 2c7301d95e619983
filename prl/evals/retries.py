"""Which failed rollouts are worth another try, when, and how fast new ones may start."""

from __future__ import annotations

import asyncio
import random
import time

from prl.config.schema import EvalRulesConfig
from prl.records import Episode, TraceError

PASSING_STATUS = (408, 409, 425, 429)
REFUSED_STATUS = (401, 403, 404)
LOST_IN_A_ROW = 10


class EndpointRefused(ConnectionError):
    """The endpoint will refuse every rollout as it refused this one: key or model are wrong."""


def first_error(episode: Episode) -> TraceError | None:
    return next((trace.error for trace in episode.traces if trace.error), None)


def is_passing(error: TraceError) -> bool:
    """Whether a failure may pass by itself: too many requests, a server error, a lost connection."""
    status = error.status
    return status is not None and (status in PASSING_STATUS or status >= 500)


def is_refusal(error: TraceError) -> bool:
    """Whether the endpoint refuses for a reason that holds for all rollouts."""
    return error.status in REFUSED_STATUS


class Backoff:
    """Pauses before repetitions: doubling, up to a limit, with jitter so that not all come back at once."""

    def __init__(self, rules: EvalRulesConfig, seed: int) -> None:
        self._rules = rules
        self._rng = random.Random(seed)

    def seconds(self, attempt: int) -> float:
        """Pause before repetition `attempt` (from 1): between half and all of backoff · 2^(attempt - 1)."""
        longest = min(self._rules.backoff * 2 ** (attempt - 1), self._rules.max_backoff)
        return longest * (0.5 + self._rng.random() / 2)


class RateLimit:
    """Starts at most so many rollouts a minute, evenly spaced; None = no limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._space = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        now = time.monotonic()
        start = max(now, self._next)
        self._next = start + self._space
        if start > now:
            await asyncio.sleep(start - now)
