"""Reading a DCP directory: any tensors of it into any memory, without a process group.

DCP's `.metadata` is a pickle that torch wrote. It is opened with an unpickler that knows DCP's own record
types and nothing else, and tensor data with `weights_only=True`, so reading a checkpoint runs no code of it.
"""

from __future__ import annotations

import pathlib
import pickle
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.serialization import _get_layout

_RECORDS = {name: getattr(dcp_metadata, name) for name in (*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING")}

_UNPICKLING_ERRORS = (pickle.UnpicklingError, EOFError, LookupError, AttributeError, TypeError, ValueError)
"""What pickle says to bytes that are none of its own."""


class CheckpointReader(FileSystemReader):
    """Reads the DCP directory `path`.

    Raises ValueError if there is none, or if its metadata holds anything but DCP's own records.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._directory = path

    @cached_property
    def tensors(self) -> dict[str, TensorStorageMetadata]:
        """Shape, dtype and chunks of every tensor in the checkpoint, by name."""
        stored = self.read_metadata().state_dict_metadata
        return {name: entry for name, entry in stored.items() if isinstance(entry, TensorStorageMetadata)}

    @cached_property
    def _metadata(self) -> Metadata:
        file = self._directory / ".metadata"
        if not file.is_file():
            raise ValueError(f"{self._directory} holds no checkpoint: it has no file .metadata")
        with file.open("rb") as stream:
            try:
                metadata = _MetadataUnpickler(stream).load()
            except _UNPICKLING_ERRORS as error:
                raise ValueError(f"{file} is damaged or is not checkpoint metadata: {error}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"{file} is not checkpoint metadata: it holds a {type(metadata).__name__}")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        return metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets` in place from the tensors of the same names, converting dtypes.

        A target is a tensor of the stored shape or a `ZeroFragment` of it. All names must be in `tensors`.
        Raises ValueError if a file is missing or damaged so that it cannot be read.
        """
        absent = targets.keys() - self.tensors.keys()
        assert not absent, f"not in {self._directory}: {sorted(absent)}"
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        self.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self.prepare_local_plan(planner.create_local_plan())
        try:
            with torch.no_grad():
                self.read_data(plan, planner).wait()
        except (pickle.UnpicklingError, EOFError, OSError, RuntimeError) as error:
            raise ValueError(f"a file of {self._directory} is missing or damaged: {error}") from error


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == dcp_metadata.__name__ and name in _RECORDS:
            return _RECORDS[name]
        if (module, name) == (_StorageInfo.__module__, _StorageInfo.__name__):
            return _StorageInfo
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _get_layout
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if module in ("pathlib", "pathlib._local") and name == "PosixPath":
            return pathlib.PosixPath
        raise pickle.UnpicklingError(f"unexpected type {module}.{name}")
