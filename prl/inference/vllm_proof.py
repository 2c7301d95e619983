"""The fingerprint of what a vLLM worker serves: read back from its memory, where that can be told.

The elements that the fingerprint covers are kept as they enter the loader. Afterwards each is compared with
the one that the worker computes with, and replaced by it where they differ: what was loaded wrongly, or
not at all, changes the fingerprint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.inference.vllm_adapter_layout import AdapterLayout
from prl.inference.vllm_layout import Block, Layout
from prl.sync.bucket import covered_in
from prl.sync.fingerprint import Fingerprinter, covered, covered_copy, covered_positions
from prl.sync.offer import Bucket


class Received:
    """The covered elements of what passes; in mode `full` that is a copy of all of it in host memory."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.values: dict[str, Tensor] = {}

    def watch(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Pass (name, tensor) on. Raises ValueError on a second tensor of one name."""
        for name, tensor in tensors:
            if name in self.shapes:
                raise ValueError(f"{name}: two tensors of this name in one set of weights")
            self.shapes[name] = tuple(tensor.shape)
            if name not in self.values:
                self.values[name] = self._read(tensor)
            yield name, tensor

    def take(self, bucket: Bucket, buffer: Tensor) -> None:
        """The covered elements of a broadcast's bucket, before its tensors pass: faster than one by one."""
        found = covered_in(bucket, buffer, self.mode)
        if self.mode == "full":
            found = {name: values.to("cpu", copy=True) for name, values in found.items()}
        self.values |= found

    def _read(self, tensor: Tensor) -> Tensor:
        if self.mode == "full":
            return covered(tensor, self.mode).to("cpu", copy=True)
        return covered_copy(tensor, self.mode)


@dataclass
class _Pick:
    """Which elements of a block are compared (`here`), and which of the covered values they must be
    (`there`): indices of both, or None and the slices of the tensor that the whole block fills."""

    block: Block
    here: Tensor | None
    there: Tensor | tuple[slice, ...]

    def read(self) -> Tensor:
        values = self.block.read()
        if self.here is None:
            return values.reshape(-1)
        self.here = self.here.to(values.device)  # once
        return values.reshape(-1).index_select(0, self.here)

    def positions(self, shape: tuple[int, ...]) -> Tensor:
        """`there` as indices of the covered values, flat."""
        if isinstance(self.there, Tensor):
            return self.there
        return torch.arange(torch.Size(shape).numel()).view(shape)[self.there].reshape(-1)


class _Known:
    """The places of one set of tensors, and how to compare all of them in one go."""

    def __init__(
        self,
        tensors: tuple[tuple[str, tuple[int, ...]], ...],
        picks: list[tuple[str, _Pick]],
        unproven: list[str],
        mode: str,
    ) -> None:
        self.tensors, self.picks, self.unproven = tensors, picks, unproven
        self._as_loaded = not any(pick.block.computed or pick.block.kept for _, pick in picks)
        self._there: Tensor | None = None
        if mode == "sampled" and picks:
            shapes, starts = dict(tensors), _starts(tensors, mode)
            self._there = torch.cat([starts[name] + pick.positions(shapes[name]) for name, pick in picks])

    def surely_same(self, arrived: list[Tensor], read: list[Tensor]) -> bool:
        """Whether all that was read has the bits of what arrived: one comparison, where it was read. False
        also where they cannot be compared so."""
        if self._there is None or not self._as_loaded:
            return False
        kinds = [{(values.device, values.dtype) for values in tensors} for tensors in (arrived, read)]
        if any(len(found) > 1 for found in kinds) or arrived[0].dtype != read[0].dtype:
            return False
        there = read[0].device
        self._there = self._there.to(there)  # once
        expected = torch.cat(arrived).to(there).index_select(0, self._there)
        return bool((_bits(expected) == _bits(torch.cat(read))).all())


class ServedProof:
    """Proves one worker's model version after version; what depends on shapes only is worked out once."""

    def __init__(self, layout: Layout | AdapterLayout, mode: str) -> None:
        self.mode, self.layout = mode, layout
        self._last: _Known | None = None

    def result(self, received: Received) -> dict[str, Any]:
        """`fingerprint` of what is served, the names that are `different` from what was received, and those
        that are `unproven` because their place is not known: their values count as received.

        Waits for the device two or three times. Raises RuntimeError if parameters of the model got no
        weights.
        """
        known = self._known(received.shapes)
        self.layout.forget_probes()
        read = [pick.read() for _, pick in known.picks]
        arrived = list(received.values.values())
        surely_same = known.surely_same(arrived, read)
        values = dict(zip(received.values, fetch(arrived), strict=True))
        different = set() if surely_same else _settle_all(known.picks, values, received.shapes, fetch(read))
        self.layout.forget_probes()
        prints = Fingerprinter(self.mode)
        for name, covered_values in values.items():
            prints.add_covered(name, received.shapes[name], covered_values)
        return {
            "fingerprint": prints.result(),
            "different": sorted(different),
            "unproven": known.unproven,
        }

    def _known(self, shapes: dict[str, tuple[int, ...]]) -> _Known:
        tensors = tuple(shapes.items())
        if self._last is None or self._last.tensors != tensors:
            picks = {name: self._picked(name, shape) for name, shape in tensors}
            unproven = sorted(name for name, found in picks.items() if found is None)
            if not unproven and (missing := self.layout.uncovered(picks)):
                raise RuntimeError(f"{len(missing)} parameters got no weights, {missing[0]} among them")
            flat = [(name, pick) for name, found in picks.items() for pick in found or ()]
            self._last = _Known(tensors, flat, unproven, self.mode)
        return self._last

    def _picked(self, name: str, shape: tuple[int, ...]) -> list[_Pick] | None:
        blocks = self.layout.blocks(name, shape)
        return None if blocks is None else [self._pick(block, shape) for block in blocks]

    def _pick(self, block: Block, shape: tuple[int, ...]) -> _Pick:
        positions = covered_positions(torch.Size(shape).numel(), self.mode)
        if positions is None and block.columns is None:
            return _Pick(block, None, block.place)
        if positions is None:
            positions = torch.arange(torch.Size(shape).numel())
        inside = torch.ones(len(positions), dtype=torch.bool)
        here = torch.zeros_like(positions)
        for dim, index in enumerate(torch.unravel_index(positions, shape)):
            local, size = index - block.start[dim], block.shape[dim]
            inside &= (local >= 0) & (local < size)
            if block.columns is not None and dim == len(shape) - 1:
                table = torch.full((size,), -1).index_copy(0, block.columns, torch.arange(len(block.columns)))
                local, size = table[local.clamp(0, size - 1)], len(block.columns)
                inside &= local >= 0
            here = here * size + local
        return _Pick(block, here[inside], inside.nonzero()[:, 0])


def _starts(tensors: tuple[tuple[str, tuple[int, ...]], ...], mode: str) -> dict[str, int]:
    """Where the covered values of each tensor begin, when those of all are laid end to end."""
    starts, end = {}, 0
    for name, shape in tensors:
        starts[name] = end
        size = torch.Size(shape).numel()
        positions = covered_positions(size, mode)
        end += size if positions is None else len(positions)
    return starts


def fetch(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors on the host; those of one device and type travel together."""
    found: dict[int, Tensor] = {}
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    for kind in kinds:
        here = [i for i, tensor in enumerate(tensors) if (tensor.device, tensor.dtype) == kind]
        if kind[0].type == "cpu":
            found |= {i: tensors[i] for i in here}
            continue
        flat = torch.cat([tensors[i].reshape(-1) for i in here]).cpu()
        found |= zip(here, flat.split([tensors[i].numel() for i in here]), strict=True)
    return [found[i] for i in range(len(tensors))]


def _settle_all(
    picks: list[tuple[str, _Pick]],
    values: dict[str, Tensor],
    shapes: dict[str, tuple[int, ...]],
    served: list[Tensor],
) -> set[str]:
    """`_settle` of every place; the names of the tensors that differ somewhere."""
    return {
        name
        for (name, pick), here in zip(picks, served, strict=True)
        if _settle(values[name], shapes[name], pick, here)
    }


def _settle(values: Tensor, shape: tuple[int, ...], pick: _Pick, served: Tensor) -> bool:
    """Put what is served in the place of what was received, where they differ; whether they did.

    The engine may compute in another type than was published: both are compared in its type.
    """
    sliced = isinstance(pick.there, tuple)
    mine = values.view(shape)[pick.there].reshape(-1) if sliced else values[pick.there]
    expected, served = mine.to(served.dtype), served.reshape(-1)
    expected = pick.block.kept(expected) if pick.block.kept else expected
    same = expected == served if pick.block.computed else _bits(expected) == _bits(served)
    if bool(same.all()):
        return False
    mixed = torch.where(same, mine, served.to(values.dtype))
    if sliced:
        values.view(shape)[pick.there] = mixed.view(values.view(shape)[pick.there].shape)
    else:
        values[pick.there] = mixed
    return True


def _bits(tensor: Tensor) -> Tensor:
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize])
