"""Pure statistics of evaluation: avg@k, pass@k, pass^k, and bootstrap intervals over tasks.

A table maps a task to the rewards of its rollouts that ended without an error, `{task: [reward, ...]}`. What
is not in a table was not measured and enters no number: tasks without a reward are left out of every mean.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb

RESAMPLES = 2000
CONFIDENCE = 0.95

Table = Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks with its 95 % bootstrap interval; `low` and `high` are None for a single task."""

    mean: float
    low: float | None
    high: float | None
    tasks: int


def average(table: Table, seed: int = 0, resamples: int = RESAMPLES) -> Estimate | None:
    """avg@k: the mean over tasks of each task's mean reward. None if nothing was measured.

    Each task counts the same, however many of its rollouts were lost to errors.
    """
    return estimate([sum(rewards) / len(rewards) for rewards in table.values() if rewards], seed, resamples)


def pass_at_k(n: int, c: int, k: int) -> float:
    """Chance that at least one of k draws without replacement from n rollouts, c of them right, is right.

    1 - C(n - c, k) / C(n, k): unbiased for the chance that one of k fresh rollouts is right (Chen et al.,
    2021, eq. 1). Raises ValueError unless 1 <= k <= n and 0 <= c <= n.
    """
    _check_counts(n, c, k)
    return 1.0 - comb(n - c, k) / comb(n, k)


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k: chance that all of k draws without replacement are right, C(c, k) / C(n, k) (Yao et al., 2024).

    Raises ValueError as `pass_at_k`.
    """
    _check_counts(n, c, k)
    return comb(c, k) / comb(n, k)


def passes(
    table: Table, seed: int = 0, resamples: int = RESAMPLES
) -> tuple[dict[int, Estimate], dict[int, Estimate]]:
    """(pass@k, pass^k) by k, for k = 1, 2, 4, ... up to the most rollouts of a task.

    Both are empty unless every reward is 0 or 1, where alone they are unbiased. A task counts for the k that
    it has rollouts enough for; `tasks` of the estimate says how many those are.
    """
    measured = [rewards for rewards in table.values() if rewards]
    if not is_binary(table):
        return {}, {}
    counts = [(len(rewards), sum(reward == 1 for reward in rewards)) for rewards in measured]
    at, hat = {}, {}
    for k in powers_of_two(max(n for n, _ in counts)):
        enough = [(n, c) for n, c in counts if n >= k]
        for estimates, formula in ((at, pass_at_k), (hat, pass_hat_k)):
            found = estimate([formula(n, c, k) for n, c in enough], seed, resamples)
            assert found is not None
            estimates[k] = found
    return at, hat


def is_binary(table: Table) -> bool:
    """Whether there are rewards and each of them is 0 or 1."""
    rewards = [reward for rewards in table.values() for reward in rewards]
    return bool(rewards) and all(reward in (0, 1) for reward in rewards)


def powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << power for power in range(most.bit_length())]


def estimate(values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES) -> Estimate | None:
    """Mean of one value a task, with the percentile bootstrap interval over tasks. None for no value.

    Deterministic in `values` and `seed`.
    """
    if not values:
        return None
    mean = math.fsum(values) / len(values)
    low, high = bootstrap_interval(values, seed, resamples) if len(values) > 1 else (None, None)
    return Estimate(mean, low, high, len(values))


def bootstrap_interval(
    values: Sequence[float], seed: int = 0, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % percentile interval of the mean: tasks are drawn with replacement, as many as there are.

    Rollouts of one task are not independent, so whole tasks are drawn (Efron's cluster bootstrap).
    """
    rng = random.Random(seed)
    count = len(values)
    means = sorted(math.fsum(rng.choices(values, k=count)) / count for _ in range(resamples))
    tail = (1.0 - CONFIDENCE) / 2
    return quantile(means, tail), quantile(means, 1.0 - tail)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Value below which `share` of the sorted values lie, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two tables task by task: `wins` are tasks with a higher mean in the second."""

    wins: int
    losses: int
    ties: int
    difference: Estimate
    """Second minus first, over the tasks of both, with a paired bootstrap interval."""

    @property
    def significant(self) -> bool:
        """Whether the interval of the difference leaves out 0."""
        low, high = self.difference.low, self.difference.high
        return low is not None and high is not None and not low <= 0.0 <= high


def compare(first: Table, second: Table, seed: int = 0, resamples: int = RESAMPLES) -> Comparison | None:
    """Compare on the tasks that both tables measured; None if there are none."""
    common = sorted(task for task in first if first[task] and second.get(task))
    means = [[sum(table[task]) / len(table[task]) for task in common] for table in (first, second)]
    deltas = [b - a for a, b in zip(*means, strict=True)]
    difference = estimate(deltas, seed, resamples)
    if difference is None:
        return None
    wins, losses = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    return Comparison(wins, losses, len(deltas) - wins - losses, difference)


def _check_counts(n: int, c: int, k: int) -> None:
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"n = {n} rollouts, c = {c} right, k = {k}: needs 1 <= k <= n and 0 <= c <= n")
