"""Attention of packed rows: every sequence by itself, causal, so that isolation holds by construction.

A row of n tokens holds sequences of the lengths that the caller passes down through the model's keyword
arguments. No [n, n] mask is ever built: a few long sequences go through the fastest causal kernel one by
one, many sequences on a GPU go through one variable-length kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

if TYPE_CHECKING:
    from prl.trainer.sequence_parallel import SequenceGroup

PACKED = "prl_packed"
"""Under this name transformers finds the kernel; it builds no mask for a name that it has no mask for."""

FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

ONE_BY_ONE = 8
"""Up to so many sequences a loop of dense kernels is faster on a GPU than the variable-length kernel."""


def register_packed_attention() -> str:
    """Make the kernel known to transformers. Returns its name."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED, packed_attention)
    return PACKED


@torch.compiler.disable
def _attend_outside_of_graphs(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
    """Keeps several sequences out of compiled layers: each new set of lengths would compile them anew."""
    return _attend(query, key, value, **options)


@torch.compiler.disable
def _attend_over_ranks(
    query: Tensor, key: Tensor, value: Tensor, group: SequenceGroup, options: dict[str, Any]
) -> Tensor:
    return group.to_tokens(_attend(*group.to_heads(query, key, value), **options))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sequence_lengths: tuple[int, ...],
    sequence_group: SequenceGroup | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, n, d], key and value [1, kv heads, n, d] -> ([1, n, heads, d], None).

    `sequence_lengths` sums to n, or with `sequence_group` to the n of all its ranks together.
    Raises ValueError for what a plain causal kernel cannot do.
    """
    if sliding_window is not None or softcap is not None or s_aux is not None:
        raise ValueError(
            "trainer.attn=auto|flash does plain causal attention only; use trainer.attn=sdpa or flex"
        )
    compiling = torch.compiler.is_compiling()
    assert attention_mask is None and query.shape[0] == 1
    options = {"lengths": sequence_lengths, "scaling": scaling, "dropout": dropout}
    if sequence_group is not None:
        assert sum(sequence_lengths) == query.shape[2] * sequence_group.size
        return _attend_over_ranks(query, key, value, sequence_group, options), None
    assert compiling or sum(sequence_lengths) == query.shape[2]
    if compiling and len(sequence_lengths) > 1:
        return _attend_outside_of_graphs(query, key, value, options), None
    return _attend(query, key, value, **options), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None, dropout: float
) -> Tensor:
    """[1, n, heads, d]. A lone sequence's length is not looked at: one compiled graph serves them all."""
    dense = {"dropout_p": dropout, "is_causal": True, "scale": scaling, "enable_gqa": True}
    if len(lengths) == 1:
        return F.scaled_dot_product_attention(query, key, value, **dense).transpose(1, 2)
    if len(lengths) > ONE_BY_ONE and not dropout and _takes_variable_lengths(query):
        return _variable_length(query, key, value, lengths, scaling)
    parts = (tensor.split(list(lengths), 2) for tensor in (query, key, value))
    outputs = [F.scaled_dot_product_attention(q, k, v, **dense) for q, k, v in zip(*parts, strict=True)]
    return torch.cat(outputs, 2).transpose(1, 2)


def _takes_variable_lengths(query: Tensor) -> bool:
    """Whether torch's flash kernel can be called by itself: it pads no heads and knows no float32."""
    return query.is_cuda and query.dtype.itemsize == 2 and query.shape[-1] in range(8, 257, 8)


def kernel_choice(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Makes a context in which torch tries its attention kernels in the order of their speed in training."""
    return partial(sdpa_kernel, FASTEST_FIRST, set_priority=True) if device.type == "cuda" else nullcontext


def _variable_length(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scaling: float | None
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    groups = query.shape[1] // key.shape[1]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [n, heads, d]
    key, value = (x.repeat_interleave(groups, 1) if groups > 1 else x for x in (key, value))
    starts, longest = _starts(lengths, query.device), max(lengths)
    out = varlen_attn(query, key, value, starts, starts, longest, longest, scale=scaling, window_size=(-1, 0))
    return out[None]


@lru_cache(maxsize=8)
def _starts(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[sequences + 1] int32 offsets; the layers of a row share them."""
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    # From memory that is not pinned the copy would wait for all work on the GPU.
    return starts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else starts.to(device)
