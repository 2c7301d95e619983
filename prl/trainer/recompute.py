"""Activation memory: what is computed again in backward, and what waits for it in host memory."""

from __future__ import annotations

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


def install_recompute(policy: PreTrainedModel, trainer: TrainerConfig) -> None:
    """Apply `trainer.recompute` and `trainer.offload_activations` to every layer, in place.

    `full` keeps the input of each layer and computes the layer again. `selective` computes only the
    feed-forward part again: it holds most of a layer's activations and little of a long row's work, which is
    in attention. Raises ValueError for a model without layers of the usual kind.
    """
    if trainer.recompute == "none":
        return
    run = partial(_checkpointed, _where_saved(trainer.offload_activations))
    layers = decoder_layers(policy)
    for layer in layers:
        if trainer.recompute == "full":
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = run
        else:
            feed_forward = getattr(layer, "mlp", None)
            if feed_forward is None:
                kind = type(layer).__name__
                raise ValueError(
                    f"trainer.recompute=selective: {kind} has no `mlp`; use trainer.recompute=full"
                )
            feed_forward.__class__ = _recomputed(type(feed_forward), trainer.offload_activations)


def decoder_layers(policy: PreTrainedModel) -> list[Any]:
    """The repeated layers. Raises ValueError if there are none of the usual kind."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(policy).__name__} has no layers that can be recomputed or compiled one by one: "
            "set trainer.recompute=none and trainer.compile=false"
        )
    return layers


def compile_layers(policy: PreTrainedModel) -> None:
    """torch.compile each layer and the norm after them: many small graphs that are alike compile once."""
    layers = decoder_layers(policy)
    norm = getattr(policy.base_model, "norm", None)
    for module in [*layers, *([norm] if isinstance(norm, nn.Module) else [])]:
        module.compile()


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
