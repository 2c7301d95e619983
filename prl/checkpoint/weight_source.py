"""The weights of a checkpoint as named tensors of files, read when they are asked for."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from prl.checkpoint.experts import is_stacked
from prl.checkpoint.fragments import ZeroFragment
from prl.checkpoint.reader import CheckpointReader
from prl.sync.weight_files import DTYPES, WeightFiles
from prl.trainer.lora import PEFT_PREFIX, merge

PREFIX = "model."
_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Spec(NamedTuple):
    """Shape and stored type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightSource(Protocol):
    """Named tensors of which a few at a time are in memory."""

    specs: dict[str, Spec]

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """New tensors of the given types, by name. Raises ValueError for a damaged file."""
        ...


class Piece(NamedTuple):
    """A file's tensor as a flat run of a stored one, from element `start` on."""

    stored: str
    start: int
    spec: Spec


class CheckpointWeights:
    """The `model.*` tensors of a sharded checkpoint; stacked experts come apart, one tensor each.

    `config`: the content of the model's config.json.
    """

    def __init__(self, reader: CheckpointReader, config: Mapping[str, Any]) -> None:
        self._reader = reader
        self._pieces: dict[str, Piece] = {}
        for stored, entry in reader.tensors.items():
            if stored.startswith(PREFIX):
                spec = Spec(tuple(entry.size), entry.properties.dtype)
                self._pieces |= pieces(stored, spec, config)
        self.specs = {name: piece.spec for name, piece in self._pieces.items()}

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        found = {name: torch.empty(self.specs[name].shape, dtype=dtype) for name, dtype in dtypes.items()}
        whole = {self._pieces[n].stored: t for n, t in found.items() if not self._is_part(n)}
        self._reader.read_into(whole)
        for name in filter(self._is_part, found):
            piece = self._pieces[name]
            shape = self._reader.tensors[piece.stored].size
            self._reader.read_into({piece.stored: ZeroFragment(found[name].view(-1), shape, piece.start)})
        return found

    def _is_part(self, name: str) -> bool:
        piece = self._pieces[name]
        return self._reader.tensors[piece.stored].size.numel() != math.prod(piece.spec.shape)


class AdapterWeights:
    """The adapters of a checkpoint, and the modules trained in full beside them, under PEFT's names.

    `tied`: second name -> first name of weights that the model has twice; PEFT's files hold them twice.
    """

    def __init__(self, reader: CheckpointReader, tied: Mapping[str, str] | None = None) -> None:
        self._reader = reader
        self._stored = {adapter_file_name(n): n for n in reader.tensors if n.startswith(PREFIX)}
        self._stored |= {f"{PEFT_PREFIX}{again}": PREFIX + first for again, first in (tied or {}).items()}
        self.specs = {
            name: Spec(tuple(reader.tensors[stored].size), reader.tensors[stored].properties.dtype)
            for name, stored in self._stored.items()
        }

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        found = {name: torch.empty(self.specs[name].shape, dtype=dtype) for name, dtype in dtypes.items()}
        once = {self._stored[name]: tensor for name, tensor in found.items()}
        self._reader.read_into(once)
        for name, tensor in found.items():
            if (first := once[self._stored[name]]) is not tensor:
                tensor.copy_(first)
        return found

    def whole(self) -> dict[str, str]:
        """Name in the model's files -> PEFT's, of the weights that are trained in full."""
        return {
            stored.removeprefix(PREFIX): name
            for name, stored in self._stored.items()
            if not _is_low_rank(stored)
        }


class MergedWeights:
    """The weights of model directory `base` with the adapters of a checkpoint added to their layers, and the
    modules that were trained in full in place of its own.

    Raises ValueError if the directory lacks a layer that was trained, or holds no weights.
    """

    def __init__(
        self, base: Path, adapters: AdapterWeights, adapter: Mapping[str, Any], num_layers: int | None
    ) -> None:
        try:
            files = WeightFiles(base)
        except FileNotFoundError as error:
            raise ValueError(f"the adapters need the weights that they were trained on: {error}") from error
        self._files, self._adapters = files, adapters
        self._scaling = adapter["lora_alpha"] / adapter["r"]
        config = json.loads((base / "config.json").read_text())
        tied = config.get("text_config", config).get("tie_word_embeddings", False)
        self.specs = {}
        for name, spec in files.specs().items():
            if _is_kept(name, num_layers) and not (tied and name == "lm_head.weight"):
                dtype = spec.dtype if isinstance(spec.dtype, torch.dtype) else DTYPES["F32"]
                self.specs[name] = Spec(spec.shape, dtype)
        self._whole = adapters.whole()
        adapted = adapters.specs.keys() - self._whole.values()
        self._targets = {_adapted_weight(name) for name in adapted}
        if absent := sorted((self._targets | self._whole.keys()) - self.specs.keys()):
            raise ValueError(f"{base} has no {absent[0]}, which was adapted: it is another model")

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        found = _read_files(self._files, dtypes)
        for name in self._targets & found.keys():
            layer = f"{PEFT_PREFIX}{name.removesuffix('.weight')}"
            names = [f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]
            a, b = self._adapters.read(dict.fromkeys(names, torch.float32)).values()
            found[name] = merge(found[name].float(), a, b, self._scaling)
        for name in self._whole.keys() & found.keys():
            (found[name],) = self._adapters.read({self._whole[name]: torch.float32}).values()
        return {name: tensor.to(dtypes[name]) for name, tensor in found.items()}


def _read_files(files: WeightFiles, names: Iterable[str]) -> dict[str, Tensor]:
    wanted, found = set(names), {}
    for file in files.files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            found |= {name: reader.get_tensor(name) for name in wanted.intersection(reader.keys())}
    return found


def adapter_file_name(stored: str) -> str:
    """PEFT's name of the stored tensor `model.<parameter>`."""
    name = stored.removeprefix(PREFIX)
    return PEFT_PREFIX + (name.replace(".default.weight", ".weight") if _is_low_rank(stored) else name)


def _is_low_rank(stored: str) -> bool:
    return ".lora_A." in stored or ".lora_B." in stored


def _adapted_weight(peft_name: str) -> str:
    return f"{peft_name.removeprefix(PEFT_PREFIX).rsplit('.', 2)[0]}.weight"


def _is_kept(name: str, num_layers: int | None) -> bool:
    match = _LAYER.search(name)
    return num_layers is None or match is None or int(match[1]) < num_layers


def pieces(stored: str, spec: Spec, config: Mapping[str, Any]) -> dict[str, Piece]:
    """By name in files, what lies in the stored tensor `model.<parameter>`: all of it, or single experts."""
    name = stored.removeprefix(PREFIX)
    if not is_stacked(config, name):
        return {name: Piece(stored, 0, spec)}
    experts, kind = name.rsplit(".", 1)
    count, rows, columns = spec.shape
    parts: Iterable[str] = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    names = [f"{experts}.{index}.{part}.weight" for index in range(count) for part in parts]
    part = Spec((rows * count // len(names), columns), spec.dtype)
    return {n: Piece(stored, index * math.prod(part.shape), part) for index, n in enumerate(names)}
