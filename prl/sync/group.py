"""The process group between a trainer and the workers of all engines, apart from any other group.

Rank 0 is the trainer, which hosts the store that everyone meets at. The store carries what the group's
shape depends on: how many workers there are, and on which devices.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

WORLD, BACKEND = "engines", "backend"

logger = logging.getLogger(__name__)


@dataclass
class Group:
    """A member of the group. `device` is where its collectives work: CPU under gloo, a GPU under NCCL."""

    process_group: Any
    store: dist.Store
    rank: int
    device: torch.device

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's `buffer` (on `device`, uint8) into everyone's. Under NCCL only the stream waits."""
        self.process_group.broadcast(buffer, 0).wait()


class Meeting:
    """The trainer's end before anyone has joined: a store that listens, on a port that the system picks."""

    def __init__(self, host: str, timeout: float) -> None:
        self.host = host
        self._timeout = timedelta(seconds=timeout)
        self._store = dist.TCPStore(host, 0, is_master=True, timeout=self._timeout, wait_for_workers=False)
        self.port: int = self._store.port

    def gather(self, session: str, device: torch.device) -> Group:
        """Wait for the engines to say how many they are, then form the group. Raises DistStoreError when they
        do not come in time."""
        store = dist.PrefixStore(session, self._store)
        store.wait([WORLD], self._timeout)
        workers = int(store.get(WORLD))
        store.wait([_device_key(rank) for rank in range(1, workers + 1)], self._timeout)
        seen = [store.get(_device_key(rank)).decode() for rank in range(1, workers + 1)]
        backend = choose_backend(device_identity(device), seen)
        store.set(BACKEND, backend)
        logger.info("weights go to %d engine workers over %s", workers, backend)
        return _form(store, backend, 0, workers + 1, device, self._timeout)


def join(
    host: str, port: int, session: str, rank: int, workers: int, timeout: float, device: torch.device
) -> Group:
    """An engine worker's end: `rank` from 1 to `workers`. Blocks until all have joined."""
    patience = timedelta(seconds=timeout)
    store = dist.PrefixStore(session, dist.TCPStore(host, port, is_master=False, timeout=patience))
    store.set(WORLD, str(workers))
    store.set(_device_key(rank), device_identity(device))
    store.wait([BACKEND], patience)
    backend = store.get(BACKEND).decode()
    return _form(store, backend, rank, workers + 1, device, patience)


def choose_backend(trainer: str, workers: list[str]) -> str:
    """NCCL where every member has a GPU of its own, else gloo: NCCL cannot have two ranks on one GPU."""
    devices = [trainer, *workers]
    own = all(device.startswith("cuda:") for device in devices) and len(set(devices)) == len(devices)
    return "nccl" if own else "gloo"


def device_identity(device: torch.device) -> str:
    """The same text in every process for the same device: a GPU's UUID with its host, or `cpu`."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{socket.gethostname()}:{torch.cuda.get_device_properties(device).uuid}"


def _form(
    store: dist.Store, backend: str, rank: int, size: int, device: torch.device, timeout: timedelta
) -> Group:
    if backend == "gloo":
        return Group(dist.ProcessGroupGloo(store, rank, size, timeout), store, rank, torch.device("cpu"))
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # both ends must agree; read when NCCL starts
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return Group(dist.ProcessGroupNCCL(store, rank, size, options), store, rank, device)


def _device_key(rank: int) -> str:
    return f"device/{rank}"
