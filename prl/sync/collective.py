"""Weights by broadcast: from the trainer's memory to every engine worker's, in buckets, without files.

The trainer offers a version (a marker that the orchestrator sees, with its fingerprint), then sends. The
orchestrator has the engines join the group once, pauses them, and asks each to receive. A broadcast that
failed is never repeated: the group's members would no longer agree on what comes next.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.serving import CollectiveConfig
from prl.records import WeightVersion
from prl.run_dir import bind_address, write_atomic
from prl.sync.fingerprint import Fingerprinter
from prl.sync.group import Group, Meeting
from prl.sync.offer import Offer, OfferedTensor, bucket_size, write_offer
from prl.sync.versions import MARKER, versions_on_disk
from prl.sync.weight_files import TensorSpec

Tensors = Callable[[], Iterator[tuple[str, Tensor]]]
"""Starts a pass over all full tensors, in the same order each time. Collective among the trainer ranks."""

logger = logging.getLogger(__name__)


class CollectivePublisher:
    """The sending end, in trainer rank 0. Its group forms at the first version, when all engines join."""

    def __init__(self, broadcasts: Path, config: CollectiveConfig, device: torch.device) -> None:
        self.broadcasts, self.config, self.device = broadcasts, config, device
        self.session = uuid.uuid4().hex[:12]
        self._meeting = Meeting(bind_address(), config.timeout)
        self._group: Group | None = None
        broadcasts.mkdir(parents=True, exist_ok=True)

    def publish(
        self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None = None
    ) -> WeightVersion:
        """Offer a version and block until every worker has received it.

        Makes two passes over `tensors`: the fingerprint must be known before anyone is asked to prove it.
        With `adapter` (the content of adapter_config.json) they are an adapter's. Raises DistStoreError when
        no engine joins within `sync.timeout`, RuntimeError when a broadcast fails.
        """
        offer, record = self._describe(version, tensors, adapter)
        directory = Path(record.path)
        directory.mkdir(exist_ok=True)
        write_offer(directory, offer)
        write_atomic(directory / MARKER, json.dumps(dataclasses.asdict(record)))
        if self._group is None:
            self._group = self._meeting.gather(self.session, self.device)
        _send(self._group, offer, tensors())
        self._retain(version)
        return record

    def _describe(
        self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None
    ) -> tuple[Offer, WeightVersion]:
        prints = Fingerprinter(self.config.fingerprint)
        offered = []
        for name, tensor in tensors():
            prints.add(name, tensor)
            offered.append(OfferedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))
        if not offered:
            raise ValueError(f"version {version} holds no weights")
        config = self.config
        offer = Offer(
            session=self.session,
            host=self._meeting.host,
            port=self._meeting.port,
            timeout=config.timeout,
            bucket_bytes=config.bucket_bytes,
            tensors=tuple(offered),
            adapter=None if adapter is None else dict(adapter),
        )
        directory = self.broadcasts / f"step_{version}"
        num_bytes = sum(tensor.num_bytes for tensor in offered)
        return offer, WeightVersion(version, str(directory), prints.result(), num_bytes)

    def _retain(self, newest: int) -> None:
        """Offers are small; the newest few tell what happened, as with files."""
        older = [version for version in versions_on_disk(self.broadcasts) if version <= newest]
        for version in older[: -self.config.keep]:
            shutil.rmtree(self.broadcasts / f"step_{version}")


class Broadcast:
    """The receiving end of one offer, as a source of weights like `WeightFiles`."""

    def __init__(self, directory: Path, offer: Offer, group: Group) -> None:
        self.directory, self.offer, self._group = directory, offer, group

    def specs(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of every tensor, known before anything is received."""
        return {
            tensor.name: TensorSpec(tensor.shape, getattr(torch, tensor.dtype))
            for tensor in self.offer.tensors
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the group's device) of every tensor, one bucket in memory at a time.

        Must be exhausted: the sender waits for every worker. A tensor is valid until its bucket's end.
        """
        for bucket in self.offer.buckets():
            buffer = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=self._group.device)
            self._group.broadcast(buffer)
            for tensor, offset in bucket:
                yield tensor.name, _view(buffer, tensor, offset)
        self._group.settle()


def drain(source: Broadcast) -> None:
    """Receive and drop: a worker that cannot use an offer must not leave the others waiting."""
    for _ in source.tensors():
        pass


def _send(group: Group, offer: Offer, tensors: Iterator[tuple[str, Tensor]]) -> None:
    for bucket in offer.buckets():
        buffer = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=group.device)
        for offered, offset in bucket:
            name, tensor = next(tensors)
            assert (name, tuple(tensor.shape)) == (offered.name, offered.shape), "the passes differ in order"
            _view(buffer, offered, offset).copy_(tensor.detach())
        group.broadcast(buffer)
    group.settle()
    assert next(tensors, None) is None, "the second pass has more tensors than the first"


def _view(buffer: Tensor, tensor: OfferedTensor, offset: int) -> Tensor:
    flat = buffer[offset : offset + tensor.num_bytes].view(getattr(torch, tensor.dtype))
    return flat.view(tensor.shape)
