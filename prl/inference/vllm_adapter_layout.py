"""Where the matrices of a LoRA adapter lie in what a vLLM worker computes with: stacks with a slot for each
adapter, one of A [slots, 1, rank, in] and one of B [slots, 1, out, rank] for each part of a fused layer. B is
kept multiplied by the adapter's scaling.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from prl.inference.vllm_layout import Block, Layout

_MATRIX = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


class AdapterLayout:
    """The places of one adapter. `config` is the content of its adapter_config.json; `manager` vLLM's of the
    adapters in this worker."""

    def __init__(self, model: nn.Module, manager: Any, adapter: int, config: Mapping[str, Any]) -> None:
        self._layout, self._manager, self._adapter = Layout(model), manager, adapter
        rank = math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]
        self._scaling = config["lora_alpha"] / rank

    def blocks(self, name: str, shape: tuple[int, ...]) -> list[Block] | None:
        """What this worker holds of a matrix under PEFT's name; None if that cannot be told."""
        matrix = _MATRIX.fullmatch(name)
        place = self._layout.find(f"{matrix[1]}.weight") if matrix else None
        layer = self._manager.modules.get(place[0]) if place else None
        if matrix is None or place is None or not hasattr(layer, "lora_b_stacked"):
            return None
        part, base = place[2], layer.base_layer
        if matrix[2] == "A":
            local = layer.lora_a_stacked[part or 0].shape[-1]
            start = 0 if local == shape[1] else base.tp_rank * local
            return self._block(layer.lora_a_stacked, part, (0, start), (shape[0], local), shape)
        rows = layer.lora_b_stacked[part or 0].shape[-2]
        start = 0 if rows == shape[0] else self._layout.first_row(base, part, shape[0])
        return self._block(layer.lora_b_stacked, part, (start, 0), (rows, shape[1]), shape, self._scaled)

    def forget_probes(self) -> None:
        """Nothing is read through kernels here."""

    def uncovered(self, names: Iterable[str]) -> list[str]:
        """An adapter need not cover the model."""
        return []

    def _block(
        self,
        stacks: tuple[Tensor, ...],
        part: int | None,
        start: tuple[int, int],
        size: tuple[int, int],
        whole: tuple[int, ...],
        kept: Callable[[Tensor], Tensor] | None = None,
    ) -> list[Block] | None:
        if any(first + count > most for first, count, most in zip(start, size, whole, strict=True)):
            return None

        def read() -> Tensor:
            slot = self._manager.lora_index_to_id.index(self._adapter)
            return stacks[part or 0][slot, 0, : size[0], : size[1]]

        return [Block(read, start, size, kept=kept)]

    def _scaled(self, b: Tensor) -> Tensor:
        return b if self._scaling == 1 else b * self._scaling
