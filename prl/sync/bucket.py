"""Tensors that lie one after the other in a buffer of bytes: what one broadcast carries."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from prl.sync.fingerprint import covered_positions
from prl.sync.offer import Bucket, OfferedTensor


class _Places(NamedTuple):
    """Where the sampled elements of all tensors of one type lie, counted in elements of that type."""

    dtype: torch.dtype
    names: list[str]
    positions: Tensor
    counts: list[int]


def view_of(buffer: Tensor, tensor: OfferedTensor, offset: int) -> Tensor:
    """The tensor that starts at byte `offset` of `buffer` (uint8, flat)."""
    flat = buffer[offset : offset + tensor.num_bytes].view(getattr(torch, tensor.dtype))
    return flat.view(tensor.shape)


def covered_in(bucket: Bucket, buffer: Tensor, mode: str) -> dict[str, Tensor]:
    """Name -> the elements that a fingerprint reads, flat, of each tensor in `buffer`, in the bucket's order.

    Sampled ones are copies, gathered for all tensors of a type at once; in mode `full` they are views.
    """
    if mode == "full":
        return {tensor.name: view_of(buffer, tensor, offset).reshape(-1) for tensor, offset in bucket}
    found: dict[str, Tensor] = {}
    for dtype, names, positions, counts in _places(bucket, buffer.device):
        usable = len(buffer) // dtype.itemsize * dtype.itemsize
        values = buffer[:usable].view(dtype).index_select(0, positions)
        found |= zip(names, values.split(counts), strict=True)
    return {tensor.name: found[tensor.name] for tensor, _ in bucket}


@functools.lru_cache(maxsize=32)  # 32 KB for each tensor; a model of more buckets works them out anew
def _places(bucket: Bucket, device: torch.device) -> list[_Places]:
    groups: dict[str, list[tuple[OfferedTensor, int]]] = {}
    for tensor, offset in bucket:
        groups.setdefault(tensor.dtype, []).append((tensor, offset))
    return [_places_of(getattr(torch, dtype), members, device) for dtype, members in groups.items()]


def _places_of(dtype: torch.dtype, members: list[tuple[OfferedTensor, int]], device: torch.device) -> _Places:
    positions = []
    for tensor, offset in members:
        size = tensor.num_bytes // dtype.itemsize
        read = covered_positions(size, "sampled", device)
        read = torch.arange(size, device=device) if read is None else read
        positions.append(read + offset // dtype.itemsize)
    names, counts = [tensor.name for tensor, _ in members], [len(read) for read in positions]
    return _Places(dtype, names, torch.cat(positions), counts)
