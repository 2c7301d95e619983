"""Token statistics of one step: accumulated on the device, reduced over rows and ranks, then named."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prl.trainer.distributed import World, all_gather_json, all_gather_rows


class Moments(NamedTuple):
    """Number, sum, sum of squares, minimum and maximum of the values of a set of tokens.

    `median` is that of the whole set where it is reported; it does not merge.
    """

    tokens: float
    total: float
    squares: float
    low: float
    high: float
    median: float = math.nan

    @property
    def mean(self) -> float:
        return self.total / self.tokens if self.tokens else math.nan

    @property
    def std(self) -> float:
        """Population standard deviation."""
        return math.sqrt(max(self.squares / self.tokens - self.mean**2, 0.0)) if self.tokens else math.nan

    def merge(self, other: Moments) -> Moments:
        return Moments(
            self.tokens + other.tokens,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )


class TokenStats:
    """Moments per metric name. `add` never waits for the device; `reduce` does once.

    A metric costs a GPU a dozen tiny kernels: vectors are kept and reduced together, as one matrix.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[str, Tensor]] = []
        self._longest = 0
        self._parts: list[tuple[str, Tensor]] = []
        self._values: dict[str, list[Tensor]] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Take a vector over tokens into account; NaN marks tokens that are not part of the metric."""
        values = values.detach().flatten()
        self._pending.append((name, values))
        self._longest = max(self._longest, len(values))
        if len(self._pending) * self._longest > PENDING_ELEMENTS:
            self.settle()
        if "median" in suffixes(name):
            self._values.setdefault(name, []).append(values.float())

    def settle(self) -> None:
        """Launch the reduction of what was added, so that it is done by the time `reduce` asks for it."""
        if self._pending:
            names, vectors = zip(*self._pending, strict=True)
            self._parts += zip(names, _moments(vectors, self._longest).unbind(), strict=True)
            self._pending, self._longest = [], 0

    def reduce(self, world: World) -> dict[str, Moments]:
        """Moments over all rows of all ranks. Collective; ranks may know different names."""
        merged: dict[str, Moments] = {}
        for rank_stats in all_gather_json(self._local(), world):
            for name, numbers in rank_stats.items():
                moments = Moments(*numbers)
                merged[name] = merged[name].merge(moments) if name in merged else moments
        names = [name for name in sorted(merged) if "median" in suffixes(name)]
        if names:
            medians = torch.stack([self._median(name, world) for name in names]).tolist()
            for name, median in zip(names, medians, strict=True):
                merged[name] = merged[name]._replace(median=median)
        return merged

    def _median(self, name: str, world: World) -> Tensor:
        """Float64 scalar. Collective, for a name that any rank knows."""
        own = torch.cat(self._values.get(name) or [torch.empty(0, device=world.device)])
        values = torch.cat(all_gather_rows(own[~own.isnan()], world)).sort().values
        return values[(len(values) - 1) // 2 : len(values) // 2 + 1].double().mean()

    def _local(self) -> dict[str, list[float]]:
        self.settle()
        if not self._parts:
            return {}
        names = [name for name, _ in self._parts]
        rows = torch.stack([part for _, part in self._parts]).tolist()
        merged: dict[str, Moments] = {}
        for name, row in zip(names, rows, strict=True):
            merged[name] = merged[name].merge(Moments(*row)) if name in merged else Moments(*row)
        return {name: list(moments[:5]) for name, moments in merged.items() if moments.tokens}


PENDING_ELEMENTS = 1 << 21
"""Elements of the matrix that vectors wait for: 16 MiB."""


def _moments(vectors: Sequence[Tensor], longest: int) -> Tensor:
    """[vectors, 5] float64, see `Moments`."""
    values = vectors[0].new_full((len(vectors), longest + 1), torch.nan, dtype=torch.float64)
    for row, vector in zip(values, vectors, strict=True):
        row[: len(vector)] = vector
    real = ~values.isnan()
    known = torch.where(real, values, 0.0)
    low = torch.where(real, values, torch.inf).amin(1)
    high = torch.where(real, values, -torch.inf).amax(1)
    return torch.stack([real.sum(1).double(), known.sum(1), known.square().sum(1), low, high], 1)


TWO_SIDED = ("mean", "std", "max")
ONE_SIDED = ("mean", "max")
ALL = ("mean", "median", "std", "min", "max")


TOTAL_LOSS = "loss/total"
"""The loss of each row, of which the sum over all rows is what was optimised: reported as `loss/mean`."""


def suffixes(name: str) -> Sequence[str]:
    """Which statistics of a token metric are reported. `loss` are the terms of tokens before the division by
    the number of members: their mean is the loss for one component of weight 1 alone, so it is told apart."""
    if name == TOTAL_LOSS:
        return ()
    if name == "loss":
        return ("median", "std", "min", "max")
    if name.startswith(("entropy/", "mismatch_kl/")):
        return TWO_SIDED
    if name.rpartition("/")[2] in ("is_masked", "masked_mismatch_kl", "unmasked_mismatch_kl"):
        return ONE_SIDED
    return ALL


def named_statistics(moments: dict[str, Moments]) -> dict[str, float]:
    """`<metric>/<statistic>` of every metric, and `kl_ent_ratio/mean` where the entropy is above 0."""
    values = {
        f"{name}/{suffix}": _statistic(found, suffix)
        for name, found in moments.items()
        for suffix in suffixes(name)
    }
    kl, entropy = values.get("mismatch_kl/all/mean"), values.get("entropy/all/mean")
    if kl is not None and entropy:
        values["kl_ent_ratio/mean"] = kl / entropy
    return values


def _statistic(moments: Moments, suffix: str) -> float:
    names = {"min": "low", "max": "high"}
    return float(getattr(moments, names.get(suffix, suffix)))
