"""The order of the data: epochs, shuffling, shares, and when a mixture ends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from prl.sft.mixture import Order, Place, mix


def epoch(order: Order, number: int = 0) -> list[Place]:
    return [order.place(number * len(order) + i) for i in range(len(order))]


def test_without_shuffling_the_rows_come_as_they_are() -> None:
    order = Order([4], seed=0, shuffle=False)
    assert [order.place(i).number for i in range(9)] == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_every_epoch_has_every_row_once_in_an_order_of_seed_plus_epoch() -> None:
    first, second = Order([50], seed=3, shuffle=True), Order([50], seed=4, shuffle=True)
    orders = [[place.number for place in epoch(first, number)] for number in range(3)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert [place.number for place in epoch(second, 0)] == orders[1]
    assert orders[0] == np.random.RandomState(3).permutation(50).tolist()


def test_going_back_gives_the_same_row() -> None:
    order = Order([7, 5], seed=1, shuffle=True)
    there = [order.place(i) for i in range(40)]
    assert [order.place(i) for i in reversed(range(40))] == there[::-1]


def test_parts_take_turns_until_all_were_seen() -> None:
    parts, numbers = mix([2, 4], None, "all_exhausted", 0)
    assert parts.tolist() == [0, 1] * 4
    assert numbers.tolist() == [0, 0, 1, 1, 0, 2, 1, 3]


def test_or_until_the_first_was_seen() -> None:
    parts, numbers = mix([2, 4], None, "first_exhausted", 0)
    assert list(zip(parts.tolist(), numbers.tolist(), strict=True)) == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize("stopping", ["all_exhausted", "first_exhausted"])
def test_shares_are_as_asked_and_the_end_is_where_a_part_ends(stopping: str) -> None:
    sizes, shares = [300, 2000, 900], [0.2, 0.5, 0.3]
    parts, numbers = mix(sizes, shares, stopping, 5)
    counts = Counter(parts.tolist())
    for part, share in enumerate(shares):
        assert counts[part] / len(parts) == pytest.approx(share, abs=0.04)
        own = numbers[parts == part]
        assert own.tolist() == [i % sizes[part] for i in range(len(own))]
    done = [counts[part] >= size for part, size in enumerate(sizes)]
    last = Counter(parts[:-1].tolist())
    before = [last[part] >= size for part, size in enumerate(sizes)]
    if stopping == "all_exhausted":
        assert all(done) and not all(before)
    else:
        assert any(done) and not any(before)


def test_a_mixture_depends_on_its_seed_alone() -> None:
    assert np.array_equal(
        mix([9, 9], [0.5, 0.5], "all_exhausted", 1), mix([9, 9], [0.5, 0.5], "all_exhausted", 1)
    )
    one, other = (mix([90, 90], [0.5, 0.5], "all_exhausted", seed)[0].tolist() for seed in (1, 2))
    assert one != other


def test_a_rare_part_ends_a_long_epoch() -> None:
    parts, _ = mix([1, 3], [0.999, 0.001], "all_exhausted", 0)
    assert (parts == 1).sum() == 3 and len(parts) > 100
