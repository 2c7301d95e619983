"""A rank's batches, its position in the data, and the counters of what was read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Protocol

from prl.config.schema import SftConfig
from prl.model_path import resolve_model_path
from prl.orchestrator.cost import RowCost, cost_of_model
from prl.orchestrator.packing import pack_batch
from prl.records import MicroBatch
from prl.sft.documents import Document
from prl.sft.packing import as_micro_batch, as_sample, make_packer
from prl.sft.position import Position, resume, start
from prl.sft.reader import Reader

LIFETIME = 10_000
"""Documents without a learned token, one after another, that an endless source may give."""


class Feed(Protocol):
    """Batches of one rank. `state()` after a step and `open_feed(..., states)` go on bitwise."""

    counters: Counter[str]
    reader: Reader

    def batch(self) -> list[MicroBatch]:
        """The rows of the next step, as many on every rank."""

    def state(self) -> dict[str, Any]:
        """JSON: the position and the counters."""

    def close(self) -> None: ...


def open_feed(
    config: SftConfig, rank: int, ranks: int, states: Sequence[dict[str, Any]] | None = None
) -> RowFeed | FitFeed:
    """The feed of `rank`; `states` are those of all ranks at the checkpoint to go on from."""
    shared = config.data.packing == "fit"
    position = Position(0, 1) if shared else start(rank, ranks)
    counters: Counter[str] = Counter()
    if states:
        position = resume([state["position"] for state in states], rank, ranks, shared=shared)
        counters = _counters(states, rank, ranks)
    reader = Reader(config.data, config.model, config.trainer.seq_len, config.seed, position)
    make = FitFeed if shared else RowFeed
    return make(config, rank, ranks, reader, counters)


def _counters(states: Sequence[dict[str, Any]], rank: int, ranks: int) -> Counter[str]:
    """The rank's own; if the number of ranks changed, the first rank takes over the sums."""
    if len(states) == ranks:
        return Counter(states[rank]["counters"])
    total: Counter[str] = Counter()
    for state in states if rank == 0 else ():
        total.update(state["counters"])
    return total


class RowFeed:
    """Rows by `packing=cat` or `stack`, from the samples that belong to this rank."""

    def __init__(
        self, config: SftConfig, rank: int, ranks: int, reader: Reader, counters: Counter[str]
    ) -> None:
        data = config.data
        self.reader, self.counters = reader, counters
        per_row = data.micro_batch_size
        self._rows = data.batch_size // (per_row * ranks)
        self._packer = make_packer(data.packing, config.trainer.seq_len, per_row, reader.position.next)
        self._env = data.name
        # Compiled layers are compiled anew for every new length.
        whole = config.trainer.seq_len * per_row if data.packing == "cat" else None
        self._length = whole if config.trainer.compile else None

    def batch(self) -> list[MicroBatch]:
        rows: list[MicroBatch] = []
        while len(rows) < self._rows:
            document = next_trainable(self.reader, self.counters)
            row = self._packer.add(document)
            if row is not None:
                for member in row:
                    count(self.counters, member)
                rows.append(as_micro_batch(row, self._env, self._length))
        return rows

    def state(self) -> dict[str, Any]:
        position = self.reader.position
        pending = [*self._packer.pending, *position.pending]
        return {
            "position": Position(position.next, position.stride, pending).state(),
            "counters": dict(self.counters),
        }

    def close(self) -> None:
        self.reader.close()


class FitFeed:
    """Exactly `batch_size` samples a step, packed by first fit and balanced; every rank reads them all."""

    def __init__(
        self, config: SftConfig, rank: int, ranks: int, reader: Reader, counters: Counter[str]
    ) -> None:
        self.reader, self.counters = reader, counters
        self._rank, self._ranks = rank, ranks
        self._samples, self._seq_len = config.data.batch_size, config.trainer.seq_len
        self._cost: RowCost = cost_of_model(resolve_model_path(config.model))
        self._env = config.data.name

    def batch(self) -> list[MicroBatch]:
        skipped: Counter[str] = Counter()
        documents = [next_trainable(self.reader, skipped) for _ in range(self._samples)]
        if self._rank == 0:  # all ranks read the same; one counts
            self.counters.update(skipped)
            for document in documents:
                count(self.counters, document)
        samples = [as_sample(document, self._env) for document in documents]
        packed = pack_batch(samples, ranks=self._ranks, seq_len=self._seq_len, cost=self._cost)
        return packed[self._rank]

    def state(self) -> dict[str, Any]:
        return {"position": self.reader.position.state(), "counters": dict(self.counters)}

    def close(self) -> None:
        self.reader.close()


def next_trainable(reader: Reader, counters: Counter[str]) -> Document:
    """The next document with a learned token; those without are counted as skipped.

    Raises ValueError when a whole epoch has none.
    """
    patience = reader.documents.size or LIFETIME
    for _ in range(patience):
        document = next(reader)
        if document.trainable:
            return document
        counters["skipped"] += 1
    raise ValueError(
        f"none of {patience} samples has a token to learn within trainer.seq_len; last: {document.name}. "
        "Check data.loss_mask and trainer.seq_len"
    )


def count(counters: Counter[str], document: Document) -> None:
    """Note that `document` is trained on."""
    size = len(document.token_ids)
    counters.update(samples=1, tokens=size, learned=sum(document.mask), truncated=int(document.truncated))
    counters.update({f"samples/{document.part}": 1, f"tokens/{document.part}": size})
