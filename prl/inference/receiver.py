"""How new weights enter the embedded engine: from files or a broadcast, whole or as an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from prl.inference.adapter import MergedAdapter
from prl.inference.dense_weights import DenseWeights
from prl.sync.collective import Broadcast, drain
from prl.sync.group import Group, join
from prl.sync.offer import read_offer
from prl.sync.weight_files import ADAPTER_CONFIG, WeightFiles


class WeightReceiver:
    """Applies published versions to `weights`, and says what is served now."""

    def __init__(self, weights: DenseWeights) -> None:
        self._weights = weights
        self._adapter = MergedAdapter(weights)
        self._group: Group | None = None

    def join(self, host: str, port: int, session: str, rank: int, workers: int, timeout: float) -> None:
        """Become worker `rank` of the trainer's group; blocks until all `workers` have joined."""
        device = self._weights.embedding.device
        self._group = join(host, port, session, rank, workers, timeout, device)

    def apply(self, directory: Path) -> None:
        """Serve the version that `directory` describes.

        Raises ValueError if it does not fit (nothing has changed), FileNotFoundError if it is not there,
        TornWeights if loading broke off.
        """
        source, adapter = self._open(directory)
        try:
            if adapter is not None:
                self._adapter.load(adapter, source.specs(), source.tensors())
                return
            self._weights.check(str(directory), source.specs(), strict=True)
        except ValueError:
            if isinstance(source, Broadcast):
                drain(source)
            raise
        self._weights.copy_from(str(directory), source.tensors())
        self._adapter.forget()

    def proof(self) -> Iterator[tuple[str, Tensor]]:
        """What the fingerprint covers, in the engine's own memory: the adapter if one is served, else all
        weights."""
        if self._adapter.tensors:
            return self._adapter.named_tensors()
        return self._weights.named_weights()

    def _open(self, directory: Path) -> tuple[WeightFiles | Broadcast, Mapping[str, Any] | None]:
        """Where the tensors come from, and the adapter's settings if they are one."""
        if offer := read_offer(directory):
            if self._group is None:
                raise ValueError(f"{directory} is a broadcast, and this engine has joined no group")
            return Broadcast(directory, offer, self._group), offer.adapter
        config = directory / ADAPTER_CONFIG
        return WeightFiles(directory), json.loads(config.read_text()) if config.is_file() else None
