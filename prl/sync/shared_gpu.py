"""Broadcast between processes of one GPU: the sender's buffer is mapped by the others, and copied on the card.

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


class SharedGpu:
    """A member's end; rank 0 sends. Blocks until every worker has the bytes."""

    def __init__(self, store: dist.Store, rank: int, workers: int, timeout: timedelta) -> None:
        self._store, self._rank, self._timeout = store, rank, timeout
        self._workers = range(1, workers + 1)
        self._count = 0

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's `buffer` (uint8, on the GPU, contiguous) into everyone's.

        Raises DistStoreError when somebody does not come in time, RuntimeError where memory cannot be shared.
        """
        self._count += 1
        if self._rank == 0:
            self._lend(buffer)
        else:
            self._take(buffer)

    def _lend(self, buffer: Tensor) -> None:
        lent, taken = f"lent/{self._count}", [f"taken/{self._count}/{rank}" for rank in self._workers]
        try:
            shared = buffer.untyped_storage()._share_cuda_()
        except RuntimeError as error:
            raise RuntimeError(REMEDY) from error
        self._store.set(lent, encode(shared[1:]))
        self._store.wait(taken, self._timeout)
        for key in [lent, *taken]:
            self._store.delete_key(key)

    def _take(self, buffer: Tensor) -> None:
        lent = f"lent/{self._count}"
        self._store.wait([lent], self._timeout)
        try:
            storage = torch.UntypedStorage._new_shared_cuda(
                buffer.device.index, *decode(self._store.get(lent))
            )
        except RuntimeError as error:
            raise RuntimeError(REMEDY) from error
        mapped = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage)
        buffer.copy_(mapped[: buffer.numel()])
        torch.cuda.current_stream(buffer.device).synchronize()  # the sender's memory is free after this
        self._store.set(f"taken/{self._count}/{self._rank}", "1")


def encode(shared: tuple[Any, ...]) -> str:
    """What `_share_cuda_` gives, as JSON: bytes as hexadecimal text."""
    return json.dumps([{"hex": item.hex()} if isinstance(item, bytes) else item for item in shared])


def decode(text: bytes) -> list[Any]:
    """The counterpart of `encode`."""
    return [bytes.fromhex(item["hex"]) if isinstance(item, dict) else item for item in json.loads(text)]
