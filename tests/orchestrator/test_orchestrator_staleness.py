"""Ages, the bound, and the lead rule, as tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.orchestrator.staleness import Age, age_at, is_stale, may_ship, may_start
from prl.records import PolicySpan


@pytest.mark.parametrize(
    ("start", "end", "step", "age"),
    [
        (0, 0, 1, Age(0, 0, 0)),
        (0, 0, 2, Age(1, 0, 1)),
        (3, 4, 6, Age(2, 1, 1)),
        (3, 5, 6, Age(2, 2, 0)),
        (3, 7, 6, Age(2, 2, 0)),
        (6, 6, 6, Age(0, 0, 0)),
    ],
)
def test_age_splits_into_flight_and_queue(start: int, end: int, step: int, age: Age) -> None:
    assert age_at(PolicySpan(start, end), step) == age


@pytest.mark.parametrize(
    ("start", "step", "bound", "stale"),
    [
        (0, 1, 0, False),
        (0, 2, 0, True),
        (0, 2, 1, False),
        (2, 5, 2, False),
        (1, 5, 2, True),
        (4, 5, 0, False),
    ],
)
def test_the_bound_counts_from_the_weights_that_train(start: int, step: int, bound: int, stale: bool) -> None:
    assert is_stale(PolicySpan(start, 99), step, bound) is stale


def test_what_a_frozen_model_sampled_never_ages() -> None:
    assert not is_stale(None, 1000, 0)


@given(st.integers(0, 20), st.integers(0, 5), st.integers(1, 30), st.integers(0, 8))
def test_stale_means_older_than_the_bound(start: int, ran: int, step: int, bound: int) -> None:
    span = PolicySpan(start, start + ran)
    age = age_at(span, step)
    assert is_stale(span, step, bound) == (age.total > bound)
    assert age.total == age.in_flight + age.in_queue and min(age.in_flight, age.in_queue) >= 0


@pytest.mark.parametrize(
    ("step", "version", "may"), [(1, 0, True), (2, 0, True), (3, 0, False), (3, 1, True)]
)
def test_batch_s_ships_at_version_s_minus_two(step: int, version: int, may: bool) -> None:
    assert may_ship(step, version) is may


@pytest.mark.parametrize(
    ("step", "version", "bound", "ahead", "may"),
    [
        (1, 0, 8, 0, True),
        (2, 0, 8, 0, True),
        (3, 0, 8, 0, False),
        (2, 0, 0, 0, False),
        (2, 1, 0, 0, True),
        (2, 1, 0, 1, False),
        (2, 0, 1, 0, True),
        (2, 0, 1, 1, False),
        (2, 0, 2, 1, True),
        (2, 0, 2, 2, False),
    ],
)
def test_rollouts_start_while_they_can_still_be_used(
    step: int, version: int, bound: int, ahead: int, may: bool
) -> None:
    assert may_start(step, version, bound, ahead) is may


@given(st.integers(1, 30), st.integers(0, 30), st.integers(0, 8), st.integers(0, 4))
def test_what_may_start_would_not_be_stale_in_its_batch(
    step: int, version: int, bound: int, ahead: int
) -> None:
    if may_start(step, version, bound, ahead):
        assert not is_stale(PolicySpan(version, version), step + ahead, bound)
        assert may_ship(step, version)
