"""Weights of a Hugging Face directory straight into the buffers that this rank holds, slice by slice."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from prl.checkpoint.fragments import ZeroFragment, boxes
from prl.checkpoint.weight_source import Piece, Spec, pieces
from prl.sync.weight_files import WeightFiles


def holds_float32(directory: Path) -> bool:
    """Whether any tensor in `directory` is more precise than 16 bits. False where there are no files."""
    try:
        specs = WeightFiles(directory).specs()
    except FileNotFoundError:
        return False
    return any(spec.dtype in (torch.float32, torch.float64) for spec in specs.values())


def read_pretrained(directory: Path, targets: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Fill `targets` (`model.<parameter>` -> `ZeroFragment`) from the safetensors in `directory`.

    Each rank reads what it owns and nothing else; types are converted on the way, so float32 targets get
    exactly what the files hold. Stacked experts are put together from the files' single ones. Persistent
    buffers (plain tensors) are read if they are there. `config`: content of config.json.

    Raises ValueError if the files lack a parameter, or hold it in another shape.
    """
    with ExitStack() as stack, torch.no_grad():
        readers = {}
        for file in WeightFiles(directory).files:
            reader = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            readers |= dict.fromkeys(reader.keys(), reader)
        for stored, target in targets.items():
            if isinstance(target, ZeroFragment):
                for name, piece in pieces(stored, Spec(tuple(target.shape), target.dtype), config).items():
                    _check(directory, name, piece, readers)
                    _fill(target, piece, readers[name].get_slice(name))
            elif (name := stored.removeprefix("model.")) in readers:
                target.copy_(readers[name].get_tensor(name))


def _check(directory: Path, name: str, piece: Piece, readers: Mapping[str, Any]) -> None:
    if name not in readers:
        raise ValueError(f"{directory} has no weights {name}, which the model needs")
    shape = tuple(readers[name].get_slice(name).get_shape())
    if shape != piece.spec.shape:
        raise ValueError(f"{directory}: {name} has shape {shape}, the model needs {piece.spec.shape}")


def _fill(target: ZeroFragment, piece: Piece, source: Any) -> None:
    """Read the part of `piece` that lies in the run of `target`."""
    size = torch.Size(piece.spec.shape).numel()
    left = max(target.start, piece.start) - piece.start
    right = min(target.start + target.run.numel(), piece.start + size) - piece.start
    for box in boxes(piece.spec.shape, left, right):
        window = tuple(slice(low, low + n) for low, n in zip(box.offsets, box.sizes, strict=True))
        begin = piece.start + box.start - target.start
        target.run[begin : begin + box.stop - box.start].view(box.sizes).copy_(source[window])
