"""Who may be trained on, and how far sampling may run ahead. Pure arithmetic on steps and policy versions.

Batch s is trained on weights v(s-1). An episode that started at version `start` is `s - 1 - start` steps old
there, the time that it waited in the queue included.
"""

from __future__ import annotations

from dataclasses import dataclass

from prl.records import PolicySpan

MAX_LEAD = 1
"""Versions that the batch being collected may be ahead of the engines: one waits while one is trained."""


@dataclass(frozen=True, slots=True)
class Age:
    """Steps between the policy that sampled an episode and the one trained; total = in_flight + in_queue."""

    total: int
    in_flight: int
    in_queue: int


def age_at(span: PolicySpan, step: int) -> Age:
    """Age of an episode in batch `step`; in flight = versions that passed while it ran."""
    total = max(0, step - 1 - span.start)
    in_flight = min(total, max(0, span.end - span.start))
    return Age(total, in_flight, total - in_flight)


def oldest_start(step: int, bound: int) -> int:
    """Oldest version that batch `step` may hold when data at most `bound` steps old is trained on."""
    return step - 1 - bound


def is_stale(span: PolicySpan | None, step: int, bound: int) -> bool:
    """Whether batch `step` must not hold the episode. What a frozen model sampled (None) never ages."""
    return span is not None and span.start < oldest_start(step, bound)


def may_ship(step: int, version: int) -> bool:
    """The lead rule: batch `step` leaves only when the engines serve v(step - 2) or newer."""
    return version >= step - 1 - MAX_LEAD


def may_start(step: int, version: int, bound: int, batches_ahead: int = 0) -> bool:
    """Whether an episode may start now, while batch `step` is collected.

    `batches_ahead`: batches that the rollouts at hand will already fill; the new one would land in the batch
    after them. One that would be stale there is work for nothing, so it waits for a newer version.
    """
    lead = step - 1 - version
    return lead <= MAX_LEAD and lead + batches_ahead <= bound
