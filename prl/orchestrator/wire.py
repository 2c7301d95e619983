"""Messages of the batch socket: msgpack, micro batches as positional arrays of their fields.

A trainer rank asks `{"want": step, "rank": r, "world": W}`; the answer is
`{"step": step, "rank": r, "micro_batches": [...]}` or `{"error": why}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import msgpack

from prl.records import MicroBatch

_FIELDS = tuple(field.name for field in fields(MicroBatch))
_values = attrgetter(*_FIELDS)


@dataclass(frozen=True, slots=True)
class Want:
    """The request of one trainer rank for its part of one batch."""

    step: int
    rank: int
    world: int


@dataclass(frozen=True, slots=True)
class Shipment:
    """One rank's part of the batch of one step."""

    step: int
    rank: int
    micro_batches: list[MicroBatch]


def encode_want(want: Want) -> bytes:
    return msgpack.packb({"want": want.step, "rank": want.rank, "world": want.world})


def decode_want(message: bytes) -> Want:
    """Raises ValueError when `message` is not a request."""
    content = _unpack(message)
    try:
        return Want(*(int(content[key]) for key in ("want", "rank", "world")))
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a request for a batch: {content!r:.200}") from error


def encode_shipment(step: int, rank: int, micro_batches: Sequence[MicroBatch]) -> bytes:
    """The answer to `Want(step, rank, ...)`. Row by row: one call would hold the GIL for long."""
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(3)
    for item in ("step", step, "rank", rank, "micro_batches"):
        packer.pack(item)
    packer.pack_array_header(len(micro_batches))
    for micro_batch in micro_batches:
        packer.pack(_values(micro_batch))
    return packer.bytes()


def encode_refusal(why: str) -> bytes:
    return msgpack.packb({"error": why})


def decode_shipment(message: bytes) -> Shipment:
    """Raises ValueError when the orchestrator refused, or when `message` is not a shipment."""
    content = _unpack(message)
    if "error" in content:
        raise ValueError(f"the orchestrator refused: {content['error']}")
    rows = content["micro_batches"]
    if any(len(row) < _REQUIRED for row in rows):
        raise ValueError(f"a micro batch on the wire has fewer than its {_REQUIRED} required fields")
    return Shipment(content["step"], content["rank"], [MicroBatch(*row) for row in rows])


_REQUIRED = sum(1 for field in fields(MicroBatch) if field.default is not None)


def _unpack(message: bytes) -> dict[str, Any]:
    try:
        content = msgpack.unpackb(message, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not msgpack: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"expected a map on the batch socket, got {type(content).__name__}")
    return content
