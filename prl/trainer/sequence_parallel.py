"""Sequence parallelism: the ranks of a group hold a part of each row, and all of it in attention.

As in DeepSpeed-Ulysses (Jacobs et al., 2023): outside of attention a rank has `tokens / N` tokens of the row
and all heads; one exchange before attention gives it all tokens and `heads / N` heads, one after it goes
back. The kernel sees whole rows with the lengths of their sequences, so they stay isolated wherever the cuts
fall. All ranks of a group get the same row, and the same logprobs of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from prl.trainer.attention import PACKED
from prl.trainer.distributed import World


@dataclass(frozen=True)
class SequenceGroup:
    """The `size` ranks that share rows; this one holds part `rank` of each."""

    ranks: dist.ProcessGroup
    rank: int
    size: int

    def part(self, row: Tensor, fill: float) -> Tensor:
        """This rank's [ceil(n / size)] of `row` [n], filled up at its end."""
        padded = F.pad(row, (0, -len(row) % self.size), value=fill)
        return padded.chunk(self.size)[self.rank]

    def whole(self, part: Tensor) -> Tensor:
        """[size * m] of the parts [m] of all ranks. Collective.

        The gradient of a part is its slice of the whole's: all ranks compute one and the same loss.
        """
        return _Whole.apply(part, self)

    def to_heads(self, *tensors: Tensor) -> list[Tensor]:
        """[1, heads, m, d] of each tensor -> [1, heads / size, size * m, d]. One exchange for all of them."""
        parts = [x[0].unflatten(0, (self.size, -1)) for x in tensors]
        exchanged = _Exchange.apply(torch.cat([x.flatten(1) for x in parts], 1), self)
        sizes = [x[0].numel() for x in parts]
        return [
            x.view_as(own).transpose(0, 1).flatten(1, 2)[None]
            for x, own in zip(exchanged.split(sizes, 1), parts, strict=True)
        ]

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[1, size * m, heads / size, d] -> [1, m, heads, d]."""
        parts = attended[0].unflatten(0, (self.size, -1))
        return _Exchange.apply(parts, self).transpose(0, 1).flatten(1, 2)[None]


def join_sequence_group(world: World) -> SequenceGroup | None:
    """The group of this rank: `world.sequence` neighbours; None where rows are not shared. Collective."""
    if world.sequence == 1:
        return None
    starts = range(0, world.size, world.sequence)
    groups = [dist.new_group(list(range(start, start + world.sequence))) for start in starts]
    return SequenceGroup(groups[world.data_rank], world.sequence_rank, world.sequence)


def check_sequence(config: Any, size: int) -> None:
    """Raises ValueError for a Hugging Face config whose attention cannot be shared by `size` ranks."""
    text = config.get_text_config()
    if config._attn_implementation != PACKED:
        raise ValueError(
            f"trainer.sequence_parallel={size}: only prl's packed attention sees whole rows; "
            "use trainer.attn=auto and a model with plain causal attention in every layer"
        )
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, key, None) or text.num_attention_heads
        if heads % size:
            raise ValueError(f"trainer.sequence_parallel={size}: {key} = {heads} is not a multiple of it")


class _Exchange(torch.autograd.Function):
    """blocks [size, ...]: block i goes to rank i, what rank i sent becomes block i. It is its own adjoint."""

    @staticmethod
    def forward(ctx: Any, blocks: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        return _exchange(blocks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(grad, ctx.group), None


def _exchange(blocks: Tensor, group: SequenceGroup) -> Tensor:
    sent = blocks.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.ranks)
    return received


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: SequenceGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size)]
        dist.all_gather(parts, part.contiguous(), group=group.ranks)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size)[ctx.group.rank], None
