"""Means over seeds, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5 % quantile of Student's t for 1 to 30 degrees of freedom."""


@dataclass(frozen=True)
class Mean:
    """Mean of `count` values; `half` is half the width of its 95 % interval, None for a single value."""

    value: float
    half: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.value:.4f}" if self.half is None else f"{self.value:.4f} ± {self.half:.4f}"


def mean_of(values: Sequence[float]) -> Mean:
    """Mean with Student's interval, which holds for few seeds too. Raises ValueError for no values."""
    count = len(values)
    if count == 0:
        raise ValueError("the mean of no values")
    mean = sum(values) / count
    if count == 1:
        return Mean(mean, None, 1)
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    quantile = T_975[count - 2] if count - 2 < len(T_975) else 1.96
    return Mean(mean, quantile * math.sqrt(variance / count), count)
