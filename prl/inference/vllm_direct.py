"""Weights written straight to where a vLLM worker keeps them, once its own loader has shown where that is.

The loader finds the place of every tensor anew at each update, which takes a small model longer than the
transfer. The places that the proof reads from are the same each time: after an update of which it found every
value where it looked, the next ones are copied there, many tensors in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from prl.inference.vllm_adapter_layout import AdapterLayout
from prl.inference.vllm_layout import Block, Layout

HELD_BYTES = 256 << 20
"""Tensors that are held until they are copied together; a broadcast's bucket lives as long as they do."""

Shape = tuple[int, ...]


class DirectWriter:
    """Writes the tensors of one set of names and shapes into a worker's parameters."""

    def __init__(self, blocks: Mapping[str, list[Block]], shapes: Mapping[str, Shape]) -> None:
        self._blocks, self._shapes = blocks, dict(shapes)

    @classmethod
    def learn(cls, layout: Layout | AdapterLayout, shapes: Mapping[str, Shape]) -> DirectWriter | None:
        """A writer for tensors of these `shapes`; None if some do not lie in memory as they are."""
        found = {name: layout.blocks(name, shape) for name, shape in shapes.items()}
        known = {name: blocks for name, blocks in found.items() if blocks is not None}
        if len(known) < len(found) or not all(_plain(block) for blocks in known.values() for block in blocks):
            return None
        return cls(known, shapes)

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        """Whether it was made for just these names and shapes."""
        return self._shapes == shapes

    def write(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy (name, tensor) pairs, each whole, to this worker's part of them; other types are converted."""
        into: list[Tensor] = []
        values: list[Tensor] = []
        held = 0
        for name, tensor in tensors:
            for block in self._blocks[name]:
                into.append(block.read())
                values.append(tensor[block.place])
            held += tensor.nbytes
            if into and held >= HELD_BYTES:
                torch._foreach_copy_(into, values)
                into, values, held = [], [], 0
        if into:
            torch._foreach_copy_(into, values)


def _plain(block: Block) -> bool:
    """Whether `read()` gives the memory itself, with the values as they were loaded."""
    return block.columns is None and not block.computed and block.kept is None
