"""Where a rank stands in the data: enough to go on exactly there, with any number of workers.

Sample `index` belongs to rank `index % ranks`. Documents are pure functions of their index, so a position is
a few numbers: the first index that was not read yet, and those that were read but not trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Position:
    """`pending` are read first, in this order, then `next`, `next + stride`, and so on."""

    next: int
    stride: int
    pending: list[int] = field(default_factory=list)

    def indices(self) -> Iterator[int]:
        """What is read from here on, without end."""
        yield from self.pending
        index = self.next
        while True:
            yield index
            index += self.stride

    def advance(self, index: int) -> None:
        """Note that `index`, the first of `indices()`, was read."""
        if self.pending:
            read = self.pending.pop(0)
        else:
            read, self.next = self.next, self.next + self.stride
        assert read == index, f"read sample {index} instead of {read}"

    def state(self) -> dict[str, Any]:
        return asdict(self)


def start(rank: int, ranks: int) -> Position:
    """The beginning of the data, for one of `ranks` readers."""
    return Position(rank, ranks)


def resume(states: Sequence[dict[str, Any]], rank: int, ranks: int, *, shared: bool = False) -> Position:
    """The position of `rank` from those of all ranks (`Position.state()`, by rank) at a checkpoint.

    With as many ranks as before each goes on exactly where it was. Otherwise every sample that was not
    trained on is dealt out anew: first those that the ranks ahead left behind, then the rest, so that none
    is lost or repeated. `shared`: every rank reads everything.
    """
    positions = [Position(**state) for state in states]
    was_shared = len(positions) > 1 and positions[0].stride == 1
    if len(positions) == ranks and was_shared == shared:
        return positions[rank]
    if was_shared:
        positions = positions[:1]
    front = max(position.next for position in positions)
    left = sorted(index for position in positions for index in _before(position, front))
    if shared:
        return Position(front, 1, left)
    return Position(front + (rank - front) % ranks, ranks, left[rank::ranks])


def _before(position: Position, front: int) -> list[int]:
    """Samples below `front` that this rank has not trained on."""
    return [*position.pending, *range(position.next, front, position.stride)]
