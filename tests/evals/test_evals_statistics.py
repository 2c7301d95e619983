"""avg@k, pass@k and pass^k against brute force; intervals that cover; comparisons that pair."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prl.evals.statistics import (
    Estimate,
    average,
    bootstrap_interval,
    compare,
    estimate,
    is_binary,
    pass_at_k,
    pass_hat_k,
    passes,
    powers_of_two,
    quantile,
)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(1, 8))
def test_pass_at_k_is_the_share_of_all_subsets(right: list[bool], k: int) -> None:
    n, c = len(right), sum(right)
    if k > n:
        with pytest.raises(ValueError, match="1 <= k <= n"):
            pass_at_k(n, c, k)
        return
    subsets = list(itertools.combinations(right, k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))
    assert pass_hat_k(n, c, k) == pytest.approx(sum(all(s) for s in subsets) / len(subsets))


def test_pass_at_k_is_unbiased_where_the_plug_in_is_not() -> None:
    rng, p, n, k = random.Random(0), 0.3, 5, 3
    draws = [sum(rng.random() < p for _ in range(n)) for _ in range(40_000)]
    truth = 1 - (1 - p) ** k
    unbiased = sum(pass_at_k(n, c, k) for c in draws) / len(draws)
    plug_in = sum(1 - (1 - c / n) ** k for c in draws) / len(draws)
    assert abs(unbiased - truth) < 0.005 < 0.03 < abs(plug_in - truth)


@pytest.mark.parametrize(("n", "c", "k"), [(3, 4, 1), (3, -1, 1), (3, 1, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="needs 1 <= k"):
        pass_hat_k(n, c, k)


def test_average_weighs_tasks_and_leaves_out_what_was_not_measured() -> None:
    found = average({"a": [1, 1, 1, 1], "b": [0.0], "lost": []})
    assert found is not None and (found.mean, found.tasks) == (0.5, 2)
    assert average({"lost": []}) is None and average({}) is None


def test_passes_are_means_over_tasks_that_have_rollouts_enough() -> None:
    at, hat = passes({"a": [1, 0, 0, 0], "b": [1, 1], "lost": []})
    assert list(at) == list(hat) == [1, 2, 4]
    assert at[1].mean == pytest.approx((0.25 + 1) / 2) and at[1].tasks == 2
    assert at[2].mean == pytest.approx((0.5 + 1) / 2) and hat[2].mean == pytest.approx((0 + 1) / 2)
    assert at[4] == Estimate(1.0, None, None, 1), "only task a has four rollouts"


@pytest.mark.parametrize("table", [{"a": [1, 0.5]}, {"a": []}, {}, {"a": [2, 0]}])
def test_no_pass_rates_unless_rewards_are_zero_or_one(table: dict[str, list[float]]) -> None:
    assert not is_binary(table) and passes(table) == ({}, {})


def test_powers_of_two() -> None:
    assert [powers_of_two(most) for most in (1, 2, 3, 4, 9)] == [[1], [1, 2], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def test_intervals_are_seeded_and_hold_the_mean() -> None:
    rng = random.Random(1)
    values = [rng.random() for _ in range(30)]
    first, again, other = (bootstrap_interval(values, seed) for seed in (0, 0, 1))
    assert first == again != other
    assert min(values) < first[0] < sum(values) / 30 < first[1] < max(values)


def test_intervals_cover_about_as_often_as_they_say() -> None:
    rng, covered = random.Random(7), 0
    for trial in range(150):
        values = [rng.gauss(0.0, 1.0) for _ in range(40)]
        low, high = bootstrap_interval(values, seed=trial, resamples=300)
        covered += low <= 0.0 <= high
    assert 0.88 <= covered / 150 <= 0.99


def test_intervals_are_those_of_an_independent_bootstrap() -> None:
    """numpy's own generator, resampling and percentiles, on skewed values; Monte Carlo error allowed."""
    rng = np.random.default_rng(5)
    values = rng.exponential(1.0, 25)
    means = values[rng.integers(0, 25, (20_000, 25))].mean(axis=1)
    expected = np.percentile(means, [2.5, 97.5])
    found = bootstrap_interval(values.tolist(), seed=3, resamples=20_000)
    assert np.abs(np.array(found) - expected).max() < 0.03 * (expected[1] - expected[0])


def test_one_task_has_no_interval() -> None:
    assert estimate([0.5]) == Estimate(0.5, None, None, 1)
    assert estimate([]) is None


def test_quantiles_are_linear_between_neighbours() -> None:
    assert [quantile([0.0, 10.0], share) for share in (0.0, 0.25, 1.0)] == [0.0, 2.5, 10.0]


def test_comparison_pairs_tasks() -> None:
    noise = {f"t{i}": random.Random(i).random() for i in range(40)}
    first = {task: [value] for task, value in noise.items()}
    second = {task: [value + 0.05] for task, value in noise.items()} | {"new": [9.0]}
    found = compare(first | {"gone": [9.0], "lost": []}, second | {"lost": [1.0]})
    assert found is not None
    assert (found.wins, found.losses, found.ties) == (40, 0, 0)
    assert found.difference.mean == pytest.approx(0.05) and found.significant
    assert found.difference.low == pytest.approx(0.05), "unpaired, the noise between tasks would drown it"


def test_comparison_of_equals_and_of_strangers() -> None:
    same = compare({"a": [1.0, 0.0], "b": [1.0]}, {"a": [0.5], "b": [1.0]})
    assert same is not None and (same.wins, same.losses, same.ties, same.significant) == (0, 0, 2, False)
    assert compare({"a": [1.0]}, {"b": [1.0]}) is None
