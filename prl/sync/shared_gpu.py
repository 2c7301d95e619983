"""Broadcast between processes of one GPU: all map one buffer of the sender, the bytes stay on the card.

NCCL cannot have two ranks on one GPU, and gloo would take the bytes through the host. What goes through the
store is CUDA's handle of the memory (CUDA IPC, as torch shares tensors between processes), as text.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

REMEDY = "the processes of one GPU cannot share its memory (CUDA IPC); choose sync=filesystem"


CHUNK_BYTES = 256 << 20
"""Largest part that is lent at once: so much of the GPU the sender keeps for it."""


class SharedGpu:
    """A member's end; rank 0 sends. Blocks until every worker has the bytes."""

    def __init__(self, store: dist.Store, rank: int, workers: int, timeout: timedelta) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._workers = range(1, workers + 1)
        self._count = 0
        self._handle = ""
        self._shared: Tensor | None = None

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's `buffer` (uint8, flat, on the GPU) into everyone's.

        Raises DistStoreError when somebody does not come in time, RuntimeError where memory cannot be shared.
        """
        for part in buffer.split(CHUNK_BYTES):
            self._count += 1
            if self._rank == 0:
                self._lend(part)
            else:
                self._take(part)

    def _lend(self, part: Tensor) -> None:
        lent, taken = f"lent/{self._count}", [f"taken/{self._count}/{rank}" for rank in self._workers]
        if self._shared is None or len(self._shared) < len(part):
            self._shared = torch.empty_like(part)
            self._handle = _handle_of(self._shared)
        self._shared[: len(part)].copy_(part)
        torch.cuda.current_stream(part.device).synchronize()
        self._store.set(lent, self._handle)
        self._store.wait(taken, self._timeout)
        for key in [lent, *taken]:
            self._store.delete_key(key)

    def _take(self, part: Tensor) -> None:
        lent = f"lent/{self._count}"
        self._store.wait([lent], self._timeout)
        handle = self._store.get(lent).decode()
        if self._shared is None or handle != self._handle:
            self._shared, self._handle = _mapped(handle, part.device), handle
        part.copy_(self._shared[: len(part)])
        torch.cuda.current_stream(part.device).synchronize()  # the sender overwrites it after this
        self._store.set(f"taken/{self._count}/{self._rank}", "1")


def _handle_of(buffer: Tensor) -> str:
    try:
        return encode(buffer.untyped_storage()._share_cuda_()[1:])
    except RuntimeError as error:
        raise RuntimeError(REMEDY) from error


def _mapped(handle: str, device: torch.device) -> Tensor:
    """The memory behind a handle, as bytes. The device's number is this process's own."""
    try:
        storage = torch.UntypedStorage._new_shared_cuda(device.index, *decode(handle))
    except (RuntimeError, TypeError) as error:
        raise RuntimeError(REMEDY) from error
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def encode(shared: tuple[Any, ...]) -> str:
    """What `_share_cuda_` gives, as JSON: bytes as hexadecimal text."""
    return json.dumps([{"hex": item.hex()} if isinstance(item, bytes) else item for item in shared])


def decode(text: str) -> list[Any]:
    """The counterpart of `encode`."""
    return [bytes.fromhex(item["hex"]) if isinstance(item, dict) else item for item in json.loads(text)]
