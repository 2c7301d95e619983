"""Documents -> packed rows, in which every document is a sequence of its own.

`cat` fills a row in the order of reading and carries the document that does not fit over to the next one.
`stack` puts documents of like length into a row, so that rows cost alike. Neither loses a document: what is
not in a row yet is `pending`, and adding it again gives the same state.
"""

from __future__ import annotations

from typing import Protocol

from prl.orchestrator.packing import PAD_TOKEN
from prl.records import MicroBatch, TrainSample
from prl.sft.documents import Document

SMALLEST_BUCKET = 256
PATIENCE = 1024
"""Samples read after which a document leaves an unfinished stack."""

Row = list[Document]


class Packer(Protocol):
    """Turns documents into rows; one document finishes at most one row."""

    def add(self, document: Document) -> Row | None:
        """Take `document`; the row that it finished, if any."""

    def flush(self) -> list[Row]:
        """What is left, as rows."""

    @property
    def pending(self) -> list[int]:
        """Indices of the documents that are in no finished row, in the order of reading."""


class Cat:
    """Rows of up to `capacity` tokens."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._row: Row = []
        self._tokens = 0

    def add(self, document: Document) -> Row | None:
        size, finished = len(document.token_ids), None
        if self._tokens + size > self._capacity:
            finished, self._row, self._tokens = self._row, [], 0
        self._row.append(document)
        self._tokens += size
        return finished

    def flush(self) -> list[Row]:
        rows, self._row, self._tokens = [self._row] if self._row else [], [], 0
        return rows

    @property
    def pending(self) -> list[int]:
        return [document.index for document in self._row]


class Stack:
    """Rows of `height` documents whose lengths share a power of two, 256 at least.

    `since`: the first index that was not read before; documents below it were pending at a checkpoint, and
    adding them again must finish no row that they did not finish then.
    """

    def __init__(self, height: int, since: int = 0) -> None:
        self._height, self._since = height, since
        self._buckets: dict[int, Row] = {}

    def add(self, document: Document) -> Row | None:
        size = SMALLEST_BUCKET
        while size < len(document.token_ids):
            size *= 2
        bucket = self._buckets.setdefault(size, [])
        bucket.append(document)
        if len(bucket) == self._height:
            return self._buckets.pop(size)
        if document.index < self._since:
            return None
        oldest = min(self._buckets, key=lambda size: self._buckets[size][0].index)
        if document.index - self._buckets[oldest][0].index > PATIENCE:
            return self._buckets.pop(oldest)
        return None

    def flush(self) -> list[Row]:
        rows, self._buckets = [self._buckets[size] for size in sorted(self._buckets)], {}
        return rows

    @property
    def pending(self) -> list[int]:
        return sorted(document.index for bucket in self._buckets.values() for document in bucket)


def make_packer(packing: str, seq_len: int, micro_batch_size: int, since: int = 0) -> Packer:
    """The packer of `data.packing`; `since` as in `Stack`."""
    return Stack(micro_batch_size, since) if packing == "stack" else Cat(seq_len * micro_batch_size)


def as_micro_batch(row: Row, env: str, length: int | None = None) -> MicroBatch:
    """A row for the trainer: cross-entropy of weight 1 on what is learned. Padded to `length` if given."""
    ids = [token for document in row for token in document.token_ids]
    positions = [i for document in row for i in range(len(document.token_ids))]
    mask = [flag for document in row for flag in document.mask]
    lengths, names = [len(document.token_ids) for document in row], [document.name for document in row]
    envs = [env] * len(row)
    if padding := max((length or 0) - len(ids), 0):
        ids += [PAD_TOKEN] * padding
        positions += range(padding)
        mask += [False] * padding
        lengths, names, envs = [*lengths, padding], [*names, ""], [*envs, ""]
    zeros = [0.0] * len(ids)
    return MicroBatch(
        input_ids=ids,
        position_ids=positions,
        loss_mask=mask,
        advantages=zeros,
        inference_logprobs=zeros,
        temperatures=[1.0] * len(ids),
        sequence_lengths=lengths,
        envs=envs,
        trace_ids=names,
        rl_weights=zeros,
        ce_weights=[float(flag) for flag in mask],
    )


def as_sample(document: Document, env: str) -> TrainSample:
    """A document for the packer of whole batches."""
    size = len(document.token_ids)
    return TrainSample(
        token_ids=document.token_ids,
        mask=document.mask,
        logprobs=[0.0] * size,
        temperatures=[1.0] * size,
        env=env,
        trace_id=document.name,
        rl_weights=[0.0] * size,
        ce_weights=[float(flag) for flag in document.mask],
    )
