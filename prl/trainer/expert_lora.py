"""Low-rank adapters of stacked experts: the gate, up and down projection of each expert has its own A and B.

They are parameters of the experts' module itself, so that ZeRO 3 gathers them together with the weights:
`experts.lora_A_gate_proj` [experts, rank, in], `experts.lora_B_gate_proj` [experts, out, rank], and so on.
The forward adds scaling B A x to W x by grouped products; nothing of the size of W is made or kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.checkpoint.experts import PROJECTIONS, adapter_names, is_stacked
from prl.config.training import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALIGNED = 8
"""Grouped products want rows of whole 16 bytes; ranks between are filled up with zeros, which adds zero."""


class ExpertAdapter(NamedTuple):
    """The adapters of one stacked parameter: its name, the weights [experts, out, in], and alpha / rank.

    `stacks`: full name -> A [experts, rank, in] or B [experts, out of a projection, rank].
    """

    name: str
    base: nn.Parameter
    stacks: dict[str, nn.Parameter]
    scaling: float

    def matrices(self) -> dict[str, Tensor]:
        """Views of every expert's A [rank, in] and B [out, rank], by name in adapter files (no prefix)."""
        found = {}
        for name, stack in self.stacks.items():
            names = adapter_names(name, stack.shape)
            assert names is not None
            found |= dict(zip(names, stack.detach(), strict=True))
        return found


class AdaptedExperts(nn.Module):
    """What a module of stacked experts becomes, in front of its own class."""

    num_experts: int
    _apply_gate: Callable[[Tensor], Tensor]
    lora_scaling: float
    lora_dropout: float

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[tokens, h] -> [tokens, h]: the experts [tokens, k] of each token, in the sum of these weights."""
        tokens, k = top_k_index.shape
        chosen, order = top_k_index.flatten().sort(stable=True)
        every = torch.arange(self.num_experts, device=chosen.device)
        ends = torch.searchsorted(chosen, every, right=True, out_int32=True)
        inside = self._apply_gate(self._project(hidden_states[order // k], ends, "gate_up_proj"))
        weighted = self._project(inside, ends, "down_proj") * top_k_weights.flatten()[order, None]
        return weighted[order.argsort()].view(tokens, k, -1).sum(1).to(hidden_states.dtype)

    def _project(self, rows: Tensor, ends: Tensor, stack: str) -> Tensor:
        """(W + scaling B A) x of each expert for its run of `rows`, which ends before row `ends[expert]`."""
        added = [self._low_rank(rows, ends, part) for part in PROJECTIONS[stack]]
        return _grouped(rows, getattr(self, stack), ends) + self.lora_scaling * torch.cat(added, -1)

    def _low_rank(self, rows: Tensor, ends: Tensor, part: str) -> Tensor:
        a, b = getattr(self, f"lora_A_{part}"), getattr(self, f"lora_B_{part}")
        if missing := -a.shape[1] % ALIGNED:
            a, b = F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))
        if self.lora_dropout:
            rows = F.dropout(rows, self.lora_dropout, self.training)
        return _grouped(_grouped(rows, a, ends), b, ends)


def _grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    from transformers.integrations.moe import _grouped_linear

    return _grouped_linear(rows, matrices, ends)


def expert_modules(policy: PreTrainedModel) -> dict[str, nn.Module]:
    """By name, the modules that hold all experts of a layer in `gate_up_proj` and `down_proj`."""
    return {
        name: module
        for name, module in policy.named_modules()
        if all(
            is_stacked(policy.config, f"{name}.{stack}") and hasattr(module, stack) for stack in PROJECTIONS
        )
    }


def install_expert_adapters(policy: PreTrainedModel, lora: LoraConfig) -> None:
    """Give all experts adapters that change nothing yet: A as PEFT draws it (torch's generator), B = 0."""
    for module in expert_modules(policy).values():
        for stack, parts in PROJECTIONS.items():
            base = getattr(module, stack)
            experts, rows, columns = getattr(base, "ds_shape", base.shape)
            for part in parts:
                a = torch.empty(experts, lora.rank, columns)
                for matrix in a:
                    nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))
                b = torch.zeros(experts, rows // len(parts), lora.rank)
                module.register_parameter(f"lora_A_{part}", nn.Parameter(a.to(base.device)))
                module.register_parameter(f"lora_B_{part}", nn.Parameter(b.to(base.device)))
        module.lora_scaling, module.lora_dropout = lora.alpha / lora.rank, lora.dropout
        module.__class__ = _adapted(type(module))


@cache
def _adapted(kind: type[nn.Module]) -> type[nn.Module]:
    """One class for the experts of all layers, so that compiled layers share their graphs."""
    return type(kind.__name__, (AdaptedExperts, kind), {"__module__": kind.__module__})


def expert_adapters(policy: nn.Module) -> Iterator[ExpertAdapter]:
    """The adapters of all stacked parameters, in the order of the model."""
    for path, module in policy.named_modules():
        if isinstance(module, AdaptedExperts):
            for stack, parts in PROJECTIONS.items():
                names = [f"lora_{side}_{part}" for part in parts for side in "AB"]
                stacks = {f"{path}.{name}": module.get_parameter(name) for name in names}
                base = module.get_parameter(stack)
                yield ExpertAdapter(f"{path}.{stack}", base, stacks, module.lora_scaling)
