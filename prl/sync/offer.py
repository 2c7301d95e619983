"""What a trainer offers when weights travel by broadcast: which tensors, in which order, and where to join.

A version's directory then holds no weights, only `collective.json` beside the usual `COMPLETE.json`. Nothing
here needs torch: the orchestrator reads it to have the engines join.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from prl.run_dir import write_atomic

OFFER_FILE = "collective.json"
ALIGNMENT = 16
"""Every tensor of a bucket starts at a multiple of so many bytes, so that it can be viewed in its type."""

ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class OfferedTensor:
    """`dtype` is torch's name without the module."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]


Bucket = tuple[tuple[OfferedTensor, int], ...]
"""Tensors and the byte at which each starts, in order."""


@dataclass(frozen=True)
class Offer:
    """One version in flight. `session` names the group of processes; engines join it once, at host:port.

    `adapter` is the content of adapter_config.json where the tensors are an adapter's.
    """

    session: str
    host: str
    port: int
    timeout: float
    bucket_bytes: int
    tensors: tuple[OfferedTensor, ...]
    adapter: dict[str, Any] | None

    @functools.cached_property
    def text(self) -> str:
        """As it is written. A run offers the same tensors at every version, so this is made once."""
        return json.dumps(asdict(self))

    @functools.cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Tensors with their offset in a bucket, in order; only a larger tensor exceeds `bucket_bytes`."""
        return tuple(self._fill())

    def _fill(self) -> Iterator[Bucket]:
        bucket: list[tuple[OfferedTensor, int]] = []
        size = 0
        for tensor in self.tensors:
            padded = -(-tensor.num_bytes // ALIGNMENT) * ALIGNMENT
            if bucket and size + padded > self.bucket_bytes:
                yield tuple(bucket)
                bucket, size = [], 0
            bucket.append((tensor, size))
            size += padded
        if bucket:
            yield tuple(bucket)


def bucket_size(bucket: Bucket) -> int:
    """Bytes of a bucket, the padding of its last tensor left out."""
    last, offset = bucket[-1]
    return offset + last.num_bytes


def write_offer(directory: Path, offer: Offer) -> None:
    write_atomic(directory / OFFER_FILE, offer.text)


def read_offer(directory: Path) -> Offer | None:
    """The offer of a version; None when its weights are files."""
    try:
        return _parse((directory / OFFER_FILE).read_text())
    except FileNotFoundError:
        return None


@functools.lru_cache(maxsize=2)  # as often read as versions are published, and the same each time
def _parse(text: str) -> Offer:
    fields = json.loads(text)
    tensors = tuple(OfferedTensor(t["name"], t["dtype"], tuple(t["shape"])) for t in fields.pop("tensors"))
    return Offer(**fields, tensors=tensors)
