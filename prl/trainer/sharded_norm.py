"""The gradient's norm at ZeRO stages 2 and 3 in a few kernels, not in several for each parameter.

DeepSpeed takes the norm tensor by tensor in float64, and stage 2 first looks in each of them for what is not
finite: at 0.6B parameters that is a twentieth of a step. A norm of norms is the same norm, so DeepSpeed's own
functions are given one tensor of norms and do all the rest, collectives and masks among it.
It touches private attributes of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from prl.trainer.bf16_step import NORM_ELEMENTS


def spare_the_sharded_norm(engine: Any) -> None:
    """Replace these parts of the DeepSpeed engine's optimizer, if it is one of stage 2 or 3; in place."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer | DeepSpeedZeroOptimizer_Stage3):
        optimizer.get_grad_norm_direct = partial(_norm, optimizer.get_grad_norm_direct)
    if isinstance(optimizer, DeepSpeedZeroOptimizer):
        optimizer.has_overflow_partitioned_grads_serial = partial(_overflows, optimizer)


def norms(gradients: Iterable[Tensor]) -> Tensor:
    """[k] float32 norms of pieces that together are all `gradients`, of which there is one at least."""
    pieces: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.detach().view(-1)
        pieces += flat.split(NORM_ELEMENTS) if len(flat) > NORM_ELEMENTS else [flat]
    return torch.stack(torch._foreach_norm(pieces, 2.0, dtype=torch.float32))


def _norm(whole: Callable[..., Tensor], gradients: list[Tensor], params: list[Any], *more: Any) -> Tensor:
    """`whole`: DeepSpeed's own, which needs a parameter beside each gradient to ask for its group."""
    return whole([norms(gradients)], params[:1], *more) if gradients else whole(gradients, params, *more)


def _overflows(optimizer: Any) -> Tensor:
    """[1] whether a gradient of this rank, or its norm in float32, is not finite."""
    found = [g for group in optimizer.averaged_gradients.values() for g in group or () if g is not None]
    if not found:
        return torch.zeros(1, dtype=torch.bool, device=optimizer.device)
    return norms(found).isfinite().all().logical_not().reshape(1)
