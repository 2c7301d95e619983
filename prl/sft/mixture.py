"""Which row comes when: parts mixed by share, an order per epoch, all a pure function of the seed.

Sample `index` counts over all ranks and epochs from 0: epoch = index // rows of an epoch. The mixture is
drawn once from the seed; each epoch shuffles it by seed + epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """A row of a part."""

    part: int
    number: int


class Order:
    """The rows of every epoch in the order in which they are learned."""

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        seed: int,
        shuffle: bool,
        probabilities: Sequence[float] | None = None,
        stopping: str = "all_exhausted",
    ) -> None:
        """`sizes`: rows of each part. `probabilities`: their shares; None = they take turns."""
        self._parts, self._numbers = mix(sizes, probabilities, stopping, seed)
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._shuffled = -1, np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Rows of an epoch."""
        return len(self._parts)

    def place(self, index: int) -> Place:
        """The row of sample `index` (from 0, without end)."""
        epoch, position = divmod(index, len(self))
        if self._shuffle:
            if epoch != self._epoch:
                # RandomState: its streams are frozen, so a resume under a newer NumPy keeps the order.
                self._shuffled = np.random.RandomState(self._seed + epoch).permutation(len(self))
                self._epoch = epoch
            position = int(self._shuffled[position])
        return Place(int(self._parts[position]), int(self._numbers[position]))


def mix(
    sizes: Sequence[int], probabilities: Sequence[float] | None, stopping: str, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(part, row number in it) of every sample of an epoch.

    A part that is exhausted before the epoch ends begins anew. `first_exhausted` ends the epoch with the
    first part that was seen as a whole, `all_exhausted` with the last.
    """
    if len(sizes) == 1:
        return np.zeros(sizes[0], dtype=np.int32), np.arange(sizes[0], dtype=np.int64)
    draw = np.random.RandomState(seed)
    needed = np.asarray(sizes, dtype=np.int64)
    counts = np.zeros(len(sizes), dtype=np.int64)
    chunks: list[np.ndarray] = []
    while True:
        size = 4 * int(needed.sum())
        chunk = (
            np.tile(np.arange(len(sizes)), -(-size // len(sizes)))
            if probabilities is None
            else draw.choice(len(sizes), size=size, p=np.asarray(probabilities) / sum(probabilities))
        ).astype(np.int32)
        end = _end(chunk, counts, needed, stopping)
        chunks.append(chunk[:end])
        counts += np.bincount(chunk[:end], minlength=len(sizes))
        if _exhausted(counts, needed, stopping):
            break
    parts = np.concatenate(chunks)
    numbers = np.empty(len(parts), dtype=np.int64)
    for part, rows in enumerate(sizes):
        own = np.flatnonzero(parts == part)
        numbers[own] = np.arange(len(own)) % rows
    return parts, numbers


def _end(chunk: np.ndarray, counts: np.ndarray, needed: np.ndarray, stopping: str) -> int:
    """How much of `chunk` belongs to the epoch: up to the draw that exhausts the first or the last part."""
    ends = []
    for part, (seen, rows) in enumerate(zip(counts, needed, strict=True)):
        where = np.flatnonzero(chunk == part)
        missing = int(rows - seen)
        ends.append(
            0 if missing <= 0 else int(where[missing - 1]) + 1 if missing <= len(where) else len(chunk)
        )
    return min(ends) if stopping == "first_exhausted" else max(ends)


def _exhausted(counts: np.ndarray, needed: np.ndarray, stopping: str) -> bool:
    done = counts >= needed
    return bool(done.any() if stopping == "first_exhausted" else done.all())
