"""The training step without DeepSpeed: what its overhead at one rank is measured against."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from prl.config.schema import RlConfig
from prl.trainer.distributed import World
from prl.trainer.engine import StepInfo
from prl.trainer.flops import model_cost
from prl.trainer.lora import install_lora
from prl.trainer.model import compute_dtype, load_policy
from prl.trainer.optimizers import build_optimizer
from prl.trainer.routing import RouterWatch


class BareEngine:
    """The step of `TrainEngine` on one rank as a plain torch loop: float32 masters and gradient sums."""

    def __init__(self, config: RlConfig, world: World) -> None:
        assert world.size == 1, "the bare engine knows no other ranks"
        self.world, self.device = world, world.device
        self._max_norm = config.optim.max_norm or math.inf
        self.model = load_policy(config.model, config.trainer, world.device, config.seed).to(world.device)
        install_lora(self.model, config.lora, config.seed)
        self.routing, self.cost = RouterWatch(self.model), model_cost(self.model.config)
        low = compute_dtype(config.trainer, world.device) != torch.float32
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self._pairs = [(p, nn.Parameter(p.detach().float())) for p in trained] if low else []
        self._masters = {id(p): master for p, master in self._pairs}
        self.optimizer = build_optimizer(config.optim, self.model)
        for group in self.optimizer.param_groups:
            group["params"] = [self._masters.get(id(p), p) for p in group["params"]]
        self._hooks = [p.register_post_accumulate_grad_hook(self._add) for p, _ in self._pairs]

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, temperatures: Tensor, lengths: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return self.model(input_ids, position_ids, temperatures, lengths)

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self, step: int, veto: Callable[[], None]) -> StepInfo:
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(params, self._max_norm)
        veto()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for param, master in self._pairs:
                param.copy_(master)
        return StepInfo(self.optimizer.param_groups[0]["lr"], float(norm))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        del self.model, self.optimizer, self._pairs, self._masters

    @torch.no_grad()
    def _add(self, param: Tensor) -> None:
        """Move a new gradient into the float32 sum of its master."""
        assert param.grad is not None
        master = self._masters[id(param)]
        master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
        param.grad = None
