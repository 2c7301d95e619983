"""Weights through files: `broadcasts/step_<version>/`, visible only when whole.

A version is written under a temporary name, renamed, and only then marked by `COMPLETE.json`, so a reader
that asks for the marker never meets a torn version, whatever a shared file system does to the order of
directory entries.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from prl.config.serving import SyncConfig
from prl.records import WeightVersion
from prl.sync.fingerprint import Fingerprinter
from prl.sync.versions import MARKER, mark_complete, newest_version, read_version, versions_on_disk
from prl.sync.weight_files import ADAPTER_CONFIG, ADAPTER_FILE, INDEX_FILE

__all__ = ["FilesystemPublisher", "newest_version", "read_version"]


class FilesystemPublisher:
    """Writes versions for the engines, from one process. Starts by removing what a dead publisher left."""

    def __init__(self, broadcasts: Path, config: SyncConfig) -> None:
        self.broadcasts = broadcasts
        self.config = config
        self.broadcasts.mkdir(parents=True, exist_ok=True)
        for leftover in self.broadcasts.glob(".step_*"):
            shutil.rmtree(leftover)

    def publish(
        self, version: int, tensors: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Any] | None = None
    ) -> WeightVersion:
        """Write a version and make it visible; keep the newest `sync.keep` up to it.

        `tensors` are full tensors under Hugging Face names, on any device; each is copied before the next
        is asked for. With `adapter`, the content of a PEFT adapter_config.json, they are an adapter's tensors
        under PEFT's names, and the version is a directory that PEFT loads. Versions newer than this one
        belong to a part of the run that was rolled back and go.
        """
        temporary = self.broadcasts / f".step_{version}.{os.getpid()}"
        _remove(temporary)
        temporary.mkdir()
        prints = Fingerprinter(self.config.fingerprint)
        if adapter is None:
            num_bytes = _write_shards(temporary, tensors, self.config.shard_bytes, prints)
        else:
            num_bytes = _write_adapter(temporary, tensors, adapter, prints)
        if num_bytes == 0:
            raise ValueError(f"version {version} holds no weights")
        final = self.broadcasts / f"step_{version}"
        _remove(final)
        temporary.rename(final)
        record = WeightVersion(version, str(final), prints.result(), num_bytes)
        mark_complete(record)
        self._retain(version)
        return record

    def _retain(self, newest: int) -> None:
        versions = versions_on_disk(self.broadcasts)
        older = [version for version in versions if version <= newest]
        keep = set(older[-self.config.keep :])
        for version in versions:
            if version not in keep:
                _remove(self.broadcasts / f"step_{version}")


def _remove(directory: Path) -> None:
    """Unmark, then delete: a reader sees the version complete or not at all."""
    if directory.exists():
        (directory / MARKER).unlink(missing_ok=True)
        shutil.rmtree(directory)


def _write_shards(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, prints: Fingerprinter
) -> int:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(_shards(tensors, shard_bytes, prints), start=1):
        file = f"model-{number:05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        num_bytes += sum(tensor.nbytes for tensor in shard.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / INDEX_FILE).write_text(json.dumps(index))
    return num_bytes


def _write_adapter(
    directory: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    prints: Fingerprinter,
) -> int:
    (shard,) = _shards(tensors, 1 << 62, prints)
    save_file(shard, directory / ADAPTER_FILE, metadata={"format": "pt"})
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config))
    return sum(tensor.nbytes for tensor in shard.values())


def _shards(
    tensors: Iterable[tuple[str, Tensor]], shard_bytes: int, prints: Fingerprinter
) -> Iterator[dict[str, Tensor]]:
    """Group tensors in order of arrival; a shard exceeds `shard_bytes` only when one tensor does."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        copy = tensor.detach().to("cpu", copy=True)  # the caller may reuse its buffer
        prints.add(name, copy)
        if shard and size + copy.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = copy.contiguous()
        size += copy.nbytes
    if shard:
        yield shard
