"""Flat runs of a tensor as ordinary chunks of a torch Distributed Checkpoint (DCP).

ZeRO gives every rank one contiguous run of each flattened parameter. DCP stores axis-aligned boxes. A run
of a row-major tensor of `d` dimensions is a union of at most `2 d - 1` boxes, so a rank can hand DCP its
run as it lies in memory: nothing is gathered on save, and a load reads only what the rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """An axis-aligned block of a tensor, and the flat run `[start, stop)` that it covers."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """The flat run `[start, stop)` of a row-major tensor as disjoint boxes, in flat order."""
    if start >= stop:
        return []
    if not shape:
        return [Box((), (), start, stop)]
    rest = tuple(shape[1:])
    row = math.prod(rest)
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:
        return _within_row(end_whole, rest, row, start, stop)
    head = _within_row(first_whole - 1, rest, row, start, first_whole * row)
    tail = _within_row(end_whole, rest, row, end_whole * row, stop)
    if first_whole == end_whole:
        return head + tail
    whole = Box(
        (first_whole, *[0] * len(rest)),
        (end_whole - first_whole, *rest),
        first_whole * row,
        end_whole * row,
    )
    return [*head, whole, *tail]


def _within_row(index: int, rest: tuple[int, ...], row: int, start: int, stop: int) -> list[Box]:
    base = index * row
    inner = boxes(rest, start - base, stop - base)
    return [Box((index, *b.offsets), (1, *b.sizes), b.start + base, b.stop + base) for b in inner]


class ZeroFragment(Tensor):
    """A tensor of the full `shape` of which this process holds one flat run.

    `run`: 1-d, any dtype and device, elements `[start, start + len(run))` of the flattened tensor. It is
    not copied: DCP saves from it and loads into it. It speaks DCP's `_Checkpointable` protocol and supports
    no arithmetic.
    """

    _run: Tensor
    _start: int
    _boxes: list[Box]

    @staticmethod
    def __new__(cls, run: Tensor, shape: Sequence[int], start: int) -> ZeroFragment:
        fragment = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=run.dtype, device=run.device, requires_grad=False
        )
        assert run.dim() == 1 and start >= 0 and start + run.numel() <= math.prod(shape)
        fragment._run, fragment._start = run, start
        fragment._boxes = boxes(tuple(shape), start, start + run.numel())
        return fragment

    def __init__(self, run: Tensor, shape: Sequence[int], start: int) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise TypeError(f"a ZeroFragment is only for saving and loading; {func} was called on it")

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ZeroFragment({tuple(self.shape)}, {self._start}:{self._start + self._run.numel()})"

    @property
    def run(self) -> Tensor:
        """The elements that this process holds, 1-d."""
        return self._run

    @property
    def start(self) -> int:
        """Index of the first of them in the flattened tensor."""
        return self._start

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box in self._boxes:
            if box.offsets == tuple(index.offset or ()):
                return self._run[box.start - self._start : box.stop - self._start].view(box.sizes)
        raise LookupError(f"this process holds no chunk {index}")


def copied(tensor: Tensor) -> Tensor:
    """A copy in host memory of a tensor, or of what a `ZeroFragment` holds."""
    if isinstance(tensor, ZeroFragment):
        return ZeroFragment(tensor.run.detach().to("cpu", copy=True), tensor.shape, tensor.start)
    return tensor.detach().to("cpu", copy=True)
