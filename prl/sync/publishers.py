"""How a trainer rank publishes: through files or by broadcast, as `sync` says. One object per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prl.config.serving import CollectiveConfig, SyncConfig
from prl.records import WeightVersion
from prl.sync.collective import CollectivePublisher
from prl.sync.filesystem import FilesystemPublisher

Tensors = Callable[[], Iterator[tuple[str, Tensor]]]


class Publisher(Protocol):
    """`publish` is collective over the trainer ranks: all make the same passes over the tensors."""

    def publish(
        self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None = None
    ) -> WeightVersion | None:
        """Publish v`version`; what was published on rank 0, None elsewhere.

        With `adapter` (the content of adapter_config.json) the tensors are an adapter's under PEFT's names.
        """
        ...


def make_publisher(broadcasts: Path, config: SyncConfig, rank: int, device: torch.device) -> Publisher:
    """The publisher of a trainer rank; `device` is the one it trains on."""
    collective = isinstance(config, CollectiveConfig)
    if rank != 0:
        return _Follower(looks_first=collective)
    if isinstance(config, CollectiveConfig):
        return CollectivePublisher(broadcasts, config, device)
    return _ThroughFiles(FilesystemPublisher(broadcasts, config))


class _ThroughFiles:
    def __init__(self, files: FilesystemPublisher) -> None:
        self._files = files

    def publish(
        self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None = None
    ) -> WeightVersion:
        return self._files.publish(version, tensors(), adapter)


class _Follower:
    """A rank that only takes part in gathering. `looks_first`: as rank 0 of a broadcast does, at the first
    version of each kind."""

    def __init__(self, looks_first: bool) -> None:
        self._looks_first = looks_first
        self._known: set[bool] = set()

    def publish(self, version: int, tensors: Tensors, adapter: Mapping[str, Any] | None = None) -> None:
        first = self._looks_first and (adapter is not None) not in self._known
        self._known.add(adapter is not None)
        for _ in range(1 + first):
            for _ in tensors():
                pass
