"""The process group between a trainer and the workers of all engines, apart from any other group.

Rank 0 is the trainer, which hosts the store that everyone meets at. The store carries what the group's
shape depends on: how many workers there are, and on which devices.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.run_dir import bind_address
from prl.sync.shared_gpu import SharedGpu

WORLD, BACKEND = "engines", "backend"

Carry = Callable[[Tensor], object]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member:
    """What a process brings into the group. `rank` 0 is the trainer, 1 to `workers` are the engines' workers.

    `timeout` holds for each wait of one for another.
    """

    store: dist.Store
    rank: int
    workers: int
    device: torch.device
    timeout: timedelta


class Group:
    """The group, as one member sees it. `device` is where buffers must be: CPU under gloo, else a GPU."""

    def __init__(self, member: Member, backend: str) -> None:
        self.backend = backend
        self.device = torch.device("cpu") if backend == "gloo" else member.device
        self._member = member
        self._carry = CARRIERS[backend](member)
        self._settled = 0

    def broadcast(self, buffer: Tensor) -> None:
        """Rank 0's `buffer` (on `device`, uint8) into everyone's. Under NCCL only the stream waits."""
        self._carry(buffer)

    def settle(self) -> None:
        """The end of an offer: every worker says that it took part, rank 0 waits for all of them.

        A broadcast alone does not tell: small buffers leave the sender before anyone has asked for them.
        Raises DistStoreError when a worker does not come in time.
        """
        self._settled += 1
        member = self._member
        keys = [f"settled/{self._settled}/{rank}" for rank in range(1, member.workers + 1)]
        if member.rank != 0:
            member.store.set(keys[member.rank - 1], "1")
            return
        member.store.wait(keys, member.timeout)
        for key in keys:
            member.store.delete_key(key)


class Meeting:
    """The trainer's end before anyone has joined: a store that listens, on a port that the system picks."""

    def __init__(self, host: str, timeout: float) -> None:
        self.host = host
        self._timeout = timedelta(seconds=timeout)
        self._store = _listen(host, self._timeout)
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
        return Group(Member(store, 0, workers, device, self._timeout), backend)


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
    return Group(Member(store, rank, workers, device, patience), backend)


def choose_backend(trainer: str, workers: list[str]) -> str:
    """NCCL where every member has a GPU of its own (it cannot have two ranks on one), memory of the GPU where
    all have the same, else gloo."""
    devices = [trainer, *workers]
    if not all(device.startswith("cuda:") for device in devices):
        return "gloo"
    distinct = len(set(devices))
    return "nccl" if distinct == len(devices) else "shared_gpu" if distinct == 1 else "gloo"


def device_identity(device: torch.device) -> str:
    """The same text in every process for the same device: a GPU's UUID with its host, or `cpu`."""
    if device.type != "cuda":
        return "cpu"
    return f"cuda:{socket.gethostname()}:{torch.cuda.get_device_properties(device).uuid}"


def _listen(host: str, timeout: timedelta) -> dist.TCPStore:
    """A store's server on `host` only; left to itself it would listen on every interface."""
    listening = socket.create_server((host, 0))
    port = listening.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _gloo(member: Member) -> Carry:
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=bind_address())]
    options._timeout = member.timeout
    store: Any = member.store
    group = dist.ProcessGroupGloo(store, member.rank, member.workers + 1, options)
    return lambda buffer: group.broadcast(buffer, 0).wait()


def _nccl(member: Member) -> Carry:
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # both ends must agree; read when NCCL starts
    torch.cuda.set_device(member.device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = member.timeout
    group = dist.ProcessGroupNCCL(member.store, member.rank, member.workers + 1, options)
    return lambda buffer: group.broadcast(buffer, 0).wait()


def _shared_gpu(member: Member) -> Carry:
    torch.cuda.set_device(member.device)
    return SharedGpu(member.store, member.rank, member.workers, member.timeout).broadcast


CARRIERS: dict[str, Callable[[Member], Carry]] = {"gloo": _gloo, "nccl": _nccl, "shared_gpu": _shared_gpu}


def _device_key(rank: int) -> str:
    return f"device/{rank}"
