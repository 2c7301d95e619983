"""ZeRO 3 by whole layers: their weights are gathered together, and what they compute can be compiled.

DeepSpeed gathers before a module's forward and backward by hooks on the module. On every module of a layer
these would be eleven small collectives for each pass of a Qwen3 layer, in the middle of what is compiled. A
layer that is a "leaf" to DeepSpeed has one pair of hooks around it.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from prl.config.memory import left_gathered, reduced_together
from prl.trainer.recompute import usual_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class View(NamedTuple):
    """A part of a gathered weight, by its place in it: the values may be given up meanwhile."""

    weight: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def shard_by_layers(policy: PreTrainedModel) -> None:
    """Let DeepSpeed's stage 3 handle each layer as one; to be called before its engine is built. In place.

    A model without layers of the usual kind is left as it is: its modules are gathered one by one.
    """
    from deepspeed.utils import set_z3_leaf_module

    for layer in usual_layers(policy):
        set_z3_leaf_module(layer, True)
        layer.register_forward_pre_hook(_expect_gradient, with_kwargs=True)
        layer.forward = partial(_forget_weights, list(layer.parameters()), layer.forward)


def layer_buckets(policy: PreTrainedModel) -> dict[str, int]:
    """DeepSpeed's settings in elements: a layer is gathered ahead of its use, and reduced in one piece."""
    layers = usual_layers(policy)
    largest = max((sum(getattr(p, "ds_numel", p.numel()) for p in m.parameters()) for m in layers), default=0)
    if not largest:
        return {}
    return {
        "stage3_prefetch_bucket_size": largest,
        "stage3_max_live_parameters": left_gathered(largest),
        "reduce_bucket_size": reduced_together(largest),
    }


def forget_engine(policy: PreTrainedModel) -> None:
    """Let go of a model whose engine is destroyed: stage 3 of DeepSpeed 0.19.8 keeps both in globals."""
    from deepspeed.runtime.zero import parameter_offload
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    parameter_offload.FWD_MODULE_STACK[:] = [m for m in parameter_offload.FWD_MODULE_STACK if m is not policy]
    cached = PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release
    inspect.getclosurevars(cached).nonlocals["func"].cache_clear()


def _expect_gradient(
    layer: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Let the input of a layer want a gradient although nothing before it is trained, and come first.

    To DeepSpeed a leaf's backward is over when its input has its gradient: at once where that wants none, and
    then the layer's own weights have theirs too late. It sees no input that is passed by its name. Raises
    ValueError for a layer whose input is not found.
    """
    if not torch.is_grad_enabled():
        return None
    if not inputs and "hidden_states" in named:
        named = dict(named)
        inputs = (named.pop("hidden_states"),)
    if not inputs or not isinstance(inputs[0], Tensor):
        kind = type(layer).__name__
        raise ValueError(f"zero=3: the input of {kind} is not its first argument; use zero=1 or zero=2")
    first = inputs[0] if inputs[0].requires_grad else inputs[0].detach().requires_grad_()
    return (first, *inputs[1:]), named


def _forget_weights(
    weights: list[nn.Parameter], forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """`forward`, of which autograd keeps none of the gathered `weights`: compiled code saves views of them.

    DeepSpeed gathers them again before backward.
    """
    gathered: dict[int, list[nn.Parameter]] = defaultdict(list)
    for weight in weights:
        gathered[weight.untyped_storage().data_ptr()].append(weight)

    def pack(tensor: Tensor) -> Tensor | View:
        start = tensor.storage_offset()
        for weight in gathered.get(tensor.untyped_storage().data_ptr(), ()):
            offset = start - weight.storage_offset()
            if 0 <= offset < weight.numel() and tensor.dtype == weight.dtype:
                return View(weight, tensor.size(), tensor.stride(), offset)
        return tensor

    with saved_tensors_hooks(pack, _unpack):
        return forward(*args, **kwargs)


def _unpack(saved: Tensor | View) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    weight = saved.weight.detach()
    return weight.as_strided(saved.size, saved.stride, weight.storage_offset() + saved.offset)
