"""Weights by broadcast: from the trainer's memory to every engine worker's, in buckets, without files.

The trainer offers a version (a marker that the orchestrator sees), then sends. The orchestrator has the
engines join the group once, pauses them, and asks each to receive. What is sent is hashed as it leaves; the
fingerprint joins the marker when the last byte is out. A broadcast that failed is never repeated: the group's
members would no longer agree on what comes next.
"""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prl.config.serving import CollectiveConfig
from prl.records import WeightVersion
from prl.run_dir import bind_address
from prl.sync.bucket import covered_in, view_of
from prl.sync.fingerprint import Fingerprinter
from prl.sync.group import Group, Meeting
from prl.sync.offer import Bucket, Offer, OfferedTensor, bucket_size, write_offer
from prl.sync.versions import mark_complete, versions_on_disk
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
        self._offers: dict[bool, Offer] = {}
        broadcasts.mkdir(parents=True, exist_ok=True)

    def publish(
        self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None = None
    ) -> WeightVersion:
        """Offer a version and block until every worker has received it.

        One pass over `tensors`; at the first version one more, for their names and shapes, which stay. With
        `adapter` (the content of adapter_config.json) they are an adapter's. Raises DistStoreError when no
        engine joins within `sync.timeout`, RuntimeError when a broadcast fails.
        """
        offer = self._offer(version, tensors, adapter)
        directory = self.broadcasts / f"step_{version}"
        num_bytes = sum(tensor.num_bytes for tensor in offer.tensors)
        record = WeightVersion(version, str(directory), self.config.fingerprint, num_bytes)
        directory.mkdir(exist_ok=True)
        write_offer(directory, offer)
        mark_complete(record)
        if self._group is None:
            self._group = self._meeting.gather(self.session, self.device)
        prints = Fingerprinter(self.config.fingerprint)
        _send(self._group, offer, tensors(), prints)
        record = replace(record, fingerprint=prints.result())
        mark_complete(record)
        self._group.settle()
        self._retain(version)
        return record

    def _offer(self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None) -> Offer:
        config = None if adapter is None else dict(adapter)
        kind = config is not None
        if kind not in self._offers:
            self._offers[kind] = self._new_offer(version, tensors, config)
        elif self._offers[kind].adapter != config:
            self._offers[kind] = replace(self._offers[kind], adapter=config)
        return self._offers[kind]

    def _new_offer(self, version: int, tensors: Tensors, adapter: dict[str, Any] | None) -> Offer:
        described = tuple(_described(*named) for named in tensors())
        if not described:
            raise ValueError(f"version {version} holds no weights")
        return Offer(
            session=self.session,
            host=self._meeting.host,
            port=self._meeting.port,
            timeout=self.config.timeout,
            bucket_bytes=self.config.bucket_bytes,
            tensors=described,
            adapter=adapter,
        )

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

    def tensors(
        self, watch: Callable[[Bucket, Tensor], object] = lambda bucket, buffer: None
    ) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the group's device) of every tensor, one bucket in memory at a time.

        Must be exhausted: the sender waits for every worker. A tensor is valid until its bucket's end.
        `watch(bucket, buffer)` sees each bucket before its tensors come.
        """
        for bucket in self.offer.buckets:
            buffer = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=self._group.device)
            self._group.broadcast(buffer)
            watch(bucket, buffer)
            for tensor, offset in bucket:
                yield tensor.name, view_of(buffer, tensor, offset)
        self._group.settle()


def drain(source: Broadcast) -> None:
    """Receive and drop: a worker that cannot use an offer must not leave the others waiting."""
    for _ in source.tensors():
        pass


def _described(name: str, tensor: Tensor) -> OfferedTensor:
    return OfferedTensor(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def _send(group: Group, offer: Offer, tensors: Iterator[tuple[str, Tensor]], prints: Fingerprinter) -> None:
    for bucket in offer.buckets:
        buffer = torch.empty(bucket_size(bucket), dtype=torch.uint8, device=group.device)
        for offered, offset in bucket:
            name, tensor = next(tensors, ("", buffer))
            assert _described(name, tensor) == offered, "this pass differs from the first"
            view_of(buffer, offered, offset).copy_(tensor.detach())
        values = covered_in(bucket, buffer, prints.mode)
        for offered, _ in bucket:
            prints.add_covered(offered.name, offered.shape, values[offered.name])
        group.broadcast(buffer)
    assert next(tensors, None) is None, "this pass has more tensors than the first"
