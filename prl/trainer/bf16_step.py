"""What DeepSpeed's optimizer for bfloat16 at stage 1 does more often than needed, done once.

Of a step of a small model its own way takes a fifth longer: each parameter's gradient is converted before it
is added, one rank copies the gradients for an all-reduce with itself, the norm is taken parameter by
parameter, and the sum is cleared twice. Gradients and weights stay the same to the bit; the norm differs in
rounding. It touches private attributes of DeepSpeed 0.19.8.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

NORM_ELEMENTS = 1 << 24
"""Elements that one norm is taken of: float32 sums of many more lose digits on CPUs."""


def spare_the_bf16_step(engine: Any, ranks: int) -> None:
    """Replace these parts of the DeepSpeed engine's optimizer, if it is that one; in place."""
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer):
        return
    if ranks == 1:
        engine.enable_backward_allreduce = False
    optimizer._update_hp_grad = _Adder(optimizer)
    optimizer.get_grads_for_norm = _Gradients(optimizer)
    # Its `step` has cleared the float32 sums already.
    optimizer.zero_grad = partial(optimizer.clear_lp_grads, set_to_none=True)


class _Adder:
    """Adds a bfloat16 gradient to its float32 sum without converting it into memory first."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, parameter: Any, group: int, index: int, clear_lp_grads: bool) -> None:
        if parameter.grad is None:
            return
        assert not clear_lp_grads, "gradients are released as soon as they are added"
        total = self._optimizer.fp32_groups_gradients[group][index]
        total.add_(parameter.grad.detach().view(total.shape))
        parameter._hp_grad = total
        self._optimizer.fp32_groups_has_gradients[group][index] = True


class _Gradients:
    """All gradients as few long tensors: everything for the norm, this rank's partition for clipping."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def __call__(self, for_clipping: bool = False) -> Any:
        if for_clipping:
            return self._optimizer.fp32_groups_gradient_flat_partition
        flat: list[Tensor] = self._optimizer.fp32_groups_actual_gradients_flat
        return [part for whole in flat for part in whole.split(NORM_ELEMENTS)], {}
