"""Optimizers as plain torch objects: DeepSpeed takes them as they are, and nothing has to be compiled.

Weight decay is decoupled everywhere: w <- w - lr * weight_decay * w. `PEAK` in a parameter group is the
learning rate that the schedule's factor multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from prl.config.training import AdamWConfig, MuonConfig, OptimConfig, SgdConfig, SignSgdConfig
from prl.trainer.muon import Muon

PEAK = "peak_lr"


def build_optimizer(config: OptimConfig, model: nn.Module) -> Optimizer:
    """The optimizer of `config` over the trainable parameters of `model`."""
    groups = _muon_groups(config, model) if isinstance(config, MuonConfig) else _one_group(config, model)
    for group in groups:
        group[PEAK] = group["lr"]
    return _BUILDERS[type(config)](config, groups)


def set_learning_rates(optimizer: Optimizer, factor: float) -> float:
    """Set every group to its peak times `factor`. Returns the rate of the first group."""
    for group in optimizer.param_groups:
        group["lr"] = group[PEAK] * factor
    return optimizer.param_groups[0]["lr"]


class DecoupledSgd(Optimizer):
    """m <- momentum m + g; w <- w - lr (g + momentum m) with Nesterov, w - lr m without."""

    def __init__(
        self, params: Any, lr: float, momentum: float, nesterov: bool, weight_decay: float = 0.0
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        _for_each_gradient(self, self._update)

    def _update(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        if group["momentum"]:
            state = self.state[weight]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(weight)
            momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
            grad = grad.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        weight.add_(grad, alpha=-group["lr"])


class SignSgd(Optimizer):
    """w <- w - lr sign(g); no state."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        _for_each_gradient(self, lambda weight, grad, group: weight.sub_(grad.sign(), alpha=group["lr"]))


def _for_each_gradient(optimizer: Optimizer, update: Callable[[Tensor, Tensor, dict[str, Any]], Any]) -> None:
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if weight.grad is not None:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                update(weight, weight.grad, group)


def _one_group(config: OptimConfig, model: nn.Module) -> list[dict[str, Any]]:
    params = [p for p in model.parameters() if p.requires_grad]
    return [{"params": params, "lr": config.lr, "weight_decay": config.weight_decay}]


def _muon_groups(config: MuonConfig, model: nn.Module) -> list[dict[str, Any]]:
    """Hidden matrices for Muon; embeddings, head, norms, biases and stacks of matrices for AdamW."""
    outer = {
        id(p) for m in (model.get_input_embeddings(), model.get_output_embeddings()) for p in m.parameters()
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    # A parameter that ZeRO 3 has taken apart remembers its shape.
    hidden = {id(p) for p in trainable if len(getattr(p, "ds_shape", p.shape)) == 2} - outer
    matrices = [p for p in trainable if id(p) in hidden]
    rest = [p for p in trainable if id(p) not in hidden]
    rest_lr = config.lr if config.adam_lr is None else config.adam_lr
    decay = {"weight_decay": config.weight_decay}
    return [
        {"params": matrices, "lr": config.lr, "matrices": True, "momentum": config.momentum, **decay},
        {"params": rest, "lr": rest_lr, "matrices": False, "betas": config.betas, "eps": config.eps, **decay},
    ]


def _adamw(config: AdamWConfig, groups: list[dict[str, Any]]) -> Optimizer:
    on_gpu = any(p.is_cuda for p in groups[0]["params"])
    return torch.optim.AdamW(groups, betas=tuple(config.betas), eps=config.eps, fused=on_gpu or None)


def _sgd(config: SgdConfig, groups: list[dict[str, Any]]) -> Optimizer:
    return DecoupledSgd(groups, config.lr, config.momentum, config.nesterov)


_BUILDERS: dict[type, Callable[[Any, list[dict[str, Any]]], Optimizer]] = {
    AdamWConfig: _adamw,
    SgdConfig: _sgd,
    SignSgdConfig: lambda config, groups: SignSgd(groups, config.lr),
    MuonConfig: lambda config, groups: Muon(groups),
}
