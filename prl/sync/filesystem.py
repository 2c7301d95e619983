"""Weights through files: `broadcasts/step_<version>/`, visible only when whole.

A version is written under a temporary name, renamed, and only then marked by `COMPLETE.json`, so a reader
that asks for the marker never meets a torn version, whatever a shared file system does to the order of
directory entries.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from prl.config.serving import SyncConfig
from prl.records import WeightVersion
from prl.run_dir import write_atomic
from prl.sync.fingerprint import Fingerprinter
from prl.sync.weight_files import INDEX_FILE

MARKER = "COMPLETE.json"
_STEP = re.compile(r"step_(\d+)$")


class FilesystemPublisher:
    """Writes versions for the engines, from one process. Starts by removing what a dead publisher left."""

    def __init__(self, broadcasts: Path, config: SyncConfig) -> None:
        self.broadcasts = broadcasts
        self.config = config
        self.broadcasts.mkdir(parents=True, exist_ok=True)
        for leftover in self.broadcasts.glob(".step_*"):
            shutil.rmtree(leftover)

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]]) -> WeightVersion:
        """Write a version and make it visible; keep the newest `sync.keep` up to it.

        `tensors` are full tensors under Hugging Face names, on any device; each is copied before the next
        is asked for. Versions newer than this one belong to a part of the run that was rolled back and go.
        """
        temporary = self.broadcasts / f".step_{version}.{os.getpid()}"
        _remove(temporary)
        temporary.mkdir()
        prints = Fingerprinter(self.config.fingerprint)
        num_bytes = _write_shards(temporary, tensors, self.config.shard_bytes, prints)
        if num_bytes == 0:
            raise ValueError(f"version {version} holds no weights")
        final = self.broadcasts / f"step_{version}"
        _remove(final)
        temporary.rename(final)
        record = WeightVersion(version, str(final), prints.result(), num_bytes)
        write_atomic(final / MARKER, json.dumps(dataclasses.asdict(record)))
        self._retain(version)
        return record

    def _retain(self, newest: int) -> None:
        versions = _versions(self.broadcasts)
        older = [version for version in versions if version <= newest]
        keep = set(older[-self.config.keep :])
        for version in versions:
            if version not in keep:
                _remove(self.broadcasts / f"step_{version}")


def newest_version(broadcasts: Path) -> WeightVersion | None:
    """The newest complete version, or None while there is none."""
    for version in reversed(_versions(broadcasts)):
        try:
            return read_version(broadcasts, version)
        except FileNotFoundError:
            continue  # still being written, or just removed
    return None


def read_version(broadcasts: Path, version: int) -> WeightVersion:
    """A complete version. Raises FileNotFoundError when it is absent or not complete."""
    directory = broadcasts / f"step_{version}"
    fields = json.loads((directory / MARKER).read_text())
    return WeightVersion(**{**fields, "path": str(directory)})


def _versions(broadcasts: Path) -> list[int]:
    if not broadcasts.is_dir():
        return []
    return sorted(int(match[1]) for entry in broadcasts.iterdir() if (match := _STEP.match(entry.name)))


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
