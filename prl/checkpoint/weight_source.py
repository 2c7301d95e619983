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

from prl.checkpoint.experts import adapter_names, is_stacked, weight_names
from prl.checkpoint.fragments import ZeroFragment
from prl.checkpoint.reader import CheckpointReader
from prl.sync.weight_files import DTYPES, WeightFiles
from prl.trainer.lora import PEFT_PREFIX, is_low_rank, merge

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

    Those of stacked experts come apart, one matrix each. `tied`: second name -> first name of weights that
    the model has twice; PEFT's files hold them twice.
    """

    def __init__(self, reader: CheckpointReader, tied: Mapping[str, str] | None = None) -> None:
        self._reader = reader
        self._pieces: dict[str, Piece] = {}
        for stored, entry in reader.tensors.items():
            if stored.startswith(PREFIX):
                self._pieces |= adapter_pieces(stored, Spec(tuple(entry.size), entry.properties.dtype))
        for again, first in (tied or {}).items():
            self._pieces[PEFT_PREFIX + again] = self._pieces[PEFT_PREFIX + first]
        self.specs = {name: piece.spec for name, piece in self._pieces.items()}

    def read(self, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Stacks are read whole and once: DCP loads all of a stored tensor for any part of it."""
        needed = {self._pieces[name].stored for name in dtypes}
        flat = {stored: torch.empty(self._reader.tensors[stored].size) for stored in needed}
        self._reader.read_into(flat)
        found = {}
        for name, dtype in dtypes.items():
            stored, start, spec = self._pieces[name]
            part = flat[stored].view(-1)[start : start + math.prod(spec.shape)].view(spec.shape)
            found[name] = part.to(dtype, copy=True)
        return found

    def whole(self) -> dict[str, str]:
        """Name in the model's files -> PEFT's, of the weights that are trained in full."""
        return {
            piece.stored.removeprefix(PREFIX): name
            for name, piece in self._pieces.items()
            if not is_low_rank(piece.stored)
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
        low_rank = {name: _low_rank_of(name) for name in self._targets & found.keys()}
        whole = {name: self._whole[name] for name in self._whole.keys() & found.keys()}
        wanted = [*whole.values(), *(side for sides in low_rank.values() for side in sides)]
        held = self._adapters.read(dict.fromkeys(wanted, torch.float32))
        for name, sides in low_rank.items():
            found[name] = merge(found[name].float(), *(held[side] for side in sides), self._scaling)
        found |= {name: held[full] for name, full in whole.items()}
        return {name: tensor.to(dtypes[name]) for name, tensor in found.items()}


def _read_files(files: WeightFiles, names: Iterable[str]) -> dict[str, Tensor]:
    wanted, found = set(names), {}
    for file in files.files:
        with safe_open(file, framework="pt", device="cpu") as reader:
            found |= {name: reader.get_tensor(name) for name in wanted.intersection(reader.keys())}
    return found


def adapter_pieces(stored: str, spec: Spec) -> dict[str, Piece]:
    """By PEFT's name, what lies in the stored tensor `model.<parameter>`: all of it, or experts' matrices."""
    name = stored.removeprefix(PREFIX)
    if names := adapter_names(name, spec.shape):
        return _in_turn(stored, [PEFT_PREFIX + n for n in names], Spec(spec.shape[1:], spec.dtype))
    plain = name.replace(".default.weight", ".weight") if is_low_rank(stored) else name
    return {PEFT_PREFIX + plain: Piece(stored, 0, spec)}


def _low_rank_of(weight: str) -> tuple[str, str]:
    """PEFT's names of the A and the B that belong to `weight`."""
    layer = f"{PEFT_PREFIX}{weight.removesuffix('.weight')}"
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


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
    count, rows, columns = spec.shape
    names = weight_names(name, count)
    return _in_turn(stored, names, Spec((rows * count // len(names), columns), spec.dtype))


def _in_turn(stored: str, names: Iterable[str], part: Spec) -> dict[str, Piece]:
    """Matrices of one shape that lie one after the other in a stored tensor."""
    size = math.prod(part.shape)
    return {name: Piece(stored, index * size, part) for index, name in enumerate(names)}
