"""Largest differencing (Karmarkar-Karp) for equal counts: items to workers so that their loads come close."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

Slots = list[tuple[float, list[int]]]
"""Load and items of each worker in a partial solution."""


def assign_equal_counts(loads: Sequence[float], workers: int) -> list[list[int]]:
    """Indices of `loads` for each worker; every worker gets as many. `len(loads)` is a multiple of `workers`.

    Items are taken in sorted chunks of one per worker; the two partial solutions that differ most are merged
    heaviest on lightest until one is left (Karmarkar & Karp, 1982), then pairs are swaped while that helps.
    """
    assert loads and len(loads) % workers == 0, f"{len(loads)} items do not divide over {workers} workers"
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    ties = itertools.count()
    heap: list[tuple[float, int, Slots]] = []
    for start in range(0, len(order), workers):
        slots: Slots = [(loads[i], [i]) for i in order[start : start + workers]]
        heapq.heappush(heap, (-_spread(slots), next(ties), slots))
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2])
        heapq.heappush(heap, (-_spread(merged), next(ties), merged))
    return _swap_while_better([items for _, items in heap[0][2]], loads)


def _spread(slots: Slots) -> float:
    values = [load for load, _ in slots]
    return max(values) - min(values)


def _merge(one: Slots, other: Slots) -> Slots:
    heavy_first = sorted(one, key=lambda slot: -slot[0])
    light_first = sorted(other, key=lambda slot: slot[0])
    return [(a + b, x + y) for (a, x), (b, y) in zip(heavy_first, light_first, strict=True)]


def _swap_while_better(parts: list[list[int]], loads: Sequence[float]) -> list[list[int]]:
    """Swap single items between the heaviest and another worker while (largest load, spread) shrinks."""
    totals = [sum(loads[i] for i in part) for part in parts]
    while (swap := _best_swap(parts, totals, loads)) is not None:
        (a, x), (b, y) = swap
        i, j = parts[a][x], parts[b][y]
        parts[a][x], parts[b][y] = j, i
        totals[a] += loads[j] - loads[i]
        totals[b] += loads[i] - loads[j]
    return parts


def _best_swap(
    parts: list[list[int]], totals: list[float], loads: Sequence[float]
) -> tuple[tuple[int, int], tuple[int, int]] | None:
    heaviest = max(range(len(parts)), key=totals.__getitem__)
    best, found = (max(totals), max(totals) - min(totals)), None
    for other in range(len(parts)):
        rest = [total for worker, total in enumerate(totals) if worker not in (heaviest, other)]
        high, low = max(rest, default=-float("inf")), min(rest, default=float("inf"))
        for x, i in enumerate(parts[heaviest]):
            for y, j in enumerate(parts[other]):
                if other == heaviest or loads[j] >= loads[i]:
                    continue
                one, two = totals[heaviest] + (loads[j] - loads[i]), totals[other] + (loads[i] - loads[j])
                top = max(high, one, two)
                outcome = (top, top - min(low, one, two))
                if outcome < best:
                    best, found = outcome, ((heaviest, x), (other, y))
    return found
