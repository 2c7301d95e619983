"""Reading a directory of safetensors: one file, shards with an index (Hugging Face), or an adapter (PEFT)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""What PEFT calls the two files of an adapter."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a file's header says about a tensor; `dtype` is the safetensors name when torch has none here."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


class WeightFiles:
    """The tensors of one directory. Opening reads headers only.

    Raises FileNotFoundError when the directory holds no weights or a shard of its index is missing.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = _files(directory)
        missing = [file.name for file in self.files if not file.is_file()]
        if missing:
            raise FileNotFoundError(
                f"{directory}: shards named by {INDEX_FILE} are missing: {', '.join(missing)}"
            )

    def specs(self) -> dict[str, TensorSpec]:
        """Name -> shape and dtype of every tensor."""
        found = {}
        for file in self.files:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    part = reader.get_slice(name)
                    dtype = part.get_dtype()
                    found[name] = TensorSpec(tuple(part.get_shape()), DTYPES.get(dtype, dtype))
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(name, CPU tensor) of every tensor, one in memory at a time."""
        for file in self.files:
            with safe_open(file, framework="pt", device="cpu") as reader:
                for name in reader.keys():  # noqa: SIM118 (not a dict)
                    yield name, reader.get_tensor(name)


def _files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    for single in (SINGLE_FILE, ADAPTER_FILE):
        if (directory / single).is_file():
            return [directory / single]
    raise FileNotFoundError(f"{directory}: holds neither {SINGLE_FILE} nor {INDEX_FILE} nor {ADAPTER_FILE}")
