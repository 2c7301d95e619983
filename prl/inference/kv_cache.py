"""Static key-value cache: one row of `length` positions per slot, the active slots always in front."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from prl.inference.decoder_config import DecoderConfig


class KvCache:
    """Keys and values of all layers: one tensor [2, layers, slots, kv_heads, length, head_dim].

    It starts as zeros that take no memory until written: attention multiplies what lies beyond a row's end
    by zero, so it must be finite.
    """

    def __init__(
        self, config: DecoderConfig, slots: int, length: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (2, config.num_layers, slots, config.num_kv_heads, length, config.head_dim)
        self.data = _lazy_zeros(shape, device, dtype)
        self.slots, self.length = slots, length
        self.kv_heads, self.head_dim = config.num_kv_heads, config.head_dim
        per_row = (slots * self.kv_heads, length, self.head_dim)
        self.rows = [(k.view(per_row), v.view(per_row)) for k, v in zip(*self.data, strict=True)]
        self.flat = [(k.view(-1, self.head_dim), v.view(-1, self.head_dim)) for k, v in self.rows]
        self._row_starts = torch.arange(slots * self.kv_heads, device=device).view(slots, -1) * length

    def positions(self, lengths: Tensor) -> Tensor:
        """Indices into `flat` of position `lengths[i]` of active slot i: [n * kv_heads]."""
        return (self._row_starts[: len(lengths)] + lengths[:, None]).view(-1)

    def store_prompts(
        self, layer: int, keys: Tensor, values: Tensor, first_slot: int, source: Tensor
    ) -> None:
        """Write prompts [b, length, kv_heads, head_dim] into slots from `first_slot` on, slot i taking
        prompt `source[i]`."""
        slots = slice(first_slot, first_slot + len(source))
        for cache, new in ((self.data[0, layer], keys), (self.data[1, layer], values)):
            cache[slots, :, : new.shape[1]] = new.transpose(1, 2)[source]

    def move(self, source: Tensor, target: Tensor, length: int) -> None:
        """Copy the first `length` positions of slots `source` over slots `target`."""
        self.data[:, :, target, :, :length] = self.data[:, :, source, :, :length]

    def clear(self, slot: int) -> None:
        """Zero one slot, after values that were not finite."""
        self.data[:, :, slot] = 0

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


def _lazy_zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    zeros = np.zeros(int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(shape)
