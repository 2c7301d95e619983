"""The repeated layers: what is computed again in backward, what waits in host memory, what is compiled."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from prl.config.training import TrainerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_layers(
    policy: PreTrainedModel, trainer: TrainerConfig, backend: str | Callable[..., Any] = "inductor"
) -> None:
    """Apply `trainer.recompute`, `offload_activations` and `compile` to every layer, in place.

    `full` keeps the input of each layer and computes the layer again. `selective` computes only the
    feed-forward part again: it holds most of a layer's activations and little of a long row's work, which is
    in attention. Layers that are alike share one compiled graph, made by `backend`; the norm after them is
    compiled too. Only what a layer computes is wrapped: hooks on it run once a pass, outside of graphs and of
    what is computed again. Raises ValueError for a model without layers of the usual kind.
    """
    if trainer.recompute == "none" and not trainer.compile:
        return
    layers = decoder_layers(policy)
    if trainer.recompute == "selective":
        for layer in layers:
            _recompute_feed_forward(layer, trainer.offload_activations)
    if trainer.compile:
        norm = getattr(policy.base_model, "norm", None)
        for module in [*layers, *([norm] if isinstance(norm, nn.Module) else [])]:
            module.forward = torch.compile(module.forward, backend=backend)
    if trainer.recompute == "full":
        saving = _where_saved(trainer.offload_activations)
        for layer in layers:
            layer.forward = partial(_checkpointed, saving, layer.forward)


def check_compiler(device: torch.device) -> None:
    """Raises ValueError where torch would find no compiler for what it makes of layers on a CPU."""
    wanted = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.type == "cpu" and shutil.which(wanted) is None:
        raise ValueError(
            f"trainer.compile=true: on CPUs torch needs a C++ compiler, and {wanted} is not there; "
            "install it, name another in the variable CXX, or set trainer.compile=false"
        )


def decoder_layers(policy: PreTrainedModel) -> list[Any]:
    """The repeated layers. Raises ValueError if there are none of the usual kind."""
    layers = usual_layers(policy)
    if not layers:
        raise ValueError(
            f"{type(policy).__name__} has no layers that can be recomputed or compiled one by one: "
            "set trainer.recompute=none and trainer.compile=false"
        )
    return layers


def usual_layers(policy: nn.Module) -> list[Any]:
    """The layers that transformers would checkpoint; a model of another make has none."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]


def _recompute_feed_forward(layer: nn.Module, offload: bool) -> None:
    feed_forward = getattr(layer, "mlp", None)
    if feed_forward is None:
        kind = type(layer).__name__
        raise ValueError(f"trainer.recompute=selective: {kind} has no `mlp`; use trainer.recompute=full")
    feed_forward.__class__ = _recomputed(type(feed_forward), offload)


@cache
def _recomputed(kind: type[nn.Module], offload: bool) -> type[nn.Module]:
    """A module class whose forward is computed again in backward.

    One class for all layers: compiled code knows a layer by the classes of its parts, so that a function
    bound to each would compile every layer anew, and after a few of them none at all.
    """
    saving = _where_saved(offload)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _checkpointed(saving, super(made, self).forward, *args, **kwargs)

    made: type[nn.Module] = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return made


def _where_saved(offload: bool) -> Callable[[], AbstractContextManager[Any]]:
    if not offload:
        return nullcontext
    return partial(save_on_cpu, pin_memory=torch.cuda.is_available())


def _checkpointed(
    saving: Callable[[], AbstractContextManager[Any]], call: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    with saving():
        return checkpoint(call, *args, use_reentrant=False, **kwargs)
