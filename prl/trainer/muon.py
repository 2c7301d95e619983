"""Muon with a float32 Newton-Schulz iteration, exact also where ZeRO has cut the matrices to pieces.

ZeRO hands an optimizer flat float32 partitions that know nothing of matrices. Momentum is element-wise and
can live there; the orthogonalisation needs whole matrices. So each flat tensor gets a `MatrixLayout` that
gathers the momentum, orthogonalises the matrices, and gives back this rank's part of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

NS_STEPS = 5
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrix: Tensor, steps: int = NS_STEPS) -> Tensor:
    """About U V^T of the singular value decomposition of `matrix` [rows, cols], by a quintic iteration.

    In the type of `matrix` (float32 here: bfloat16 would be slower on CPUs and less exact).
    Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = NS_COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def matrix_update(momentum: Tensor) -> Tensor:
    """Orthogonalised `momentum` [rows, cols], scaled by sqrt(max(1, rows / cols))."""
    rows, cols = momentum.shape
    return orthogonalize(momentum) * max(1.0, rows / cols) ** 0.5


class MatrixLayout(Protocol):
    """Where the matrices of one flat partition are."""

    def update(self, momentum: Tensor) -> Tensor:
        """This rank's flat part of `matrix_update` of every matrix. Collective."""
        ...


class Muon(Optimizer):
    """Muon for groups with `matrices`, AdamW for the others.

    m <- mu m + g; u = g + mu m; W <- (1 - lr * decay) W - lr sqrt(max(1, rows / cols)) NS(u).
    Parameters of a matrix group are matrices, or flat tensors for which `layouts` has an entry.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__([group for group in groups if group["params"]], {})
        self.layouts: dict[Tensor, MatrixLayout] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            update = self._update_matrix if group["matrices"] else self._update_adam
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    update(weight, weight.grad, group)

    def _update_matrix(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        momentum = state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
        nesterov = grad.add(momentum, alpha=group["momentum"])
        update = matrix_update(nesterov) if weight.dim() == 2 else self.layouts[weight].update(nesterov)
        weight.add_(update, alpha=-group["lr"])

    def _update_adam(self, weight: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        state["step"] += 1
        count = int(state["step"])
        mean = state["exp_avg"].lerp_(grad, 1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        scale = (square / (1 - beta2**count)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, scale, value=-group["lr"] / (1 - beta1**count))


@dataclass(frozen=True)
class GroupLayout:
    """ZeRO 1 and 2: the matrices of a group lie one after the other, and the whole is cut into equal parts.

    A rank orthogonalises only the matrices that its part touches. `group` None = one rank.
    """

    shapes: Sequence[torch.Size]
    rank: int
    world: int
    group: dist.ProcessGroup | None = None

    def update(self, momentum: Tensor) -> Tensor:
        size = momentum.numel()
        low, high = self.rank * size, (self.rank + 1) * size
        whole = _all_gather(momentum, self.world, self.group).flatten()
        result, start = torch.zeros_like(momentum), 0
        for shape in self.shapes:
            stop = start + shape.numel()
            first, last = max(start, low), min(stop, high)
            if first < last:
                flat = matrix_update(whole[start:stop].view(shape)).flatten()
                result[first - low : last - low] = flat[first - start : last - start]
            start = stop
        return result


@dataclass(frozen=True)
class ParameterLayout:
    """ZeRO 3: every matrix is cut into equal parts by itself; a rank's flat tensor is its parts in order.

    `parts`: elements of each matrix a rank holds, padded. Every rank orthogonalises every matrix.
    """

    shapes: Sequence[torch.Size]
    parts: Sequence[int]
    rank: int
    world: int
    group: dist.ProcessGroup | None = None

    def update(self, momentum: Tensor) -> Tensor:
        whole = _all_gather(momentum, self.world, self.group)
        result = torch.zeros_like(momentum)
        offset = 0
        for shape, part in zip(self.shapes, self.parts, strict=True):
            flat = whole[:, offset : offset + part].flatten()[: shape.numel()]
            mine = matrix_update(flat.view(shape)).flatten()[self.rank * part : (self.rank + 1) * part]
            result[offset : offset + mine.numel()] = mine
            offset += part
        return result


def _all_gather(part: Tensor, world: int, group: dist.ProcessGroup | None) -> Tensor:
    """[world, size] of every rank's `part` [size]."""
    if world == 1:
        return part[None]
    parts = [torch.empty_like(part) for _ in range(world)]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.stack(parts)


def bind_layouts(muon: Muon, zero: Any, stage: int) -> None:
    """Tell `muon` where the matrices are in the partitions of DeepSpeed's ZeRO optimizer `zero`."""
    matrix_groups = [i for i, group in enumerate(muon.param_groups) if group["matrices"]]
    if stage == 3:
        for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
            if zero.sub_group_to_group_id[i] in matrix_groups:
                muon.layouts[flat] = _parameter_layout(zero.fp16_groups[i])
        return
    if hasattr(zero, "bf16_groups"):
        lists, flats = zero.bf16_groups, zero.fp32_groups_flat_partition
    else:
        lists, flats = zero.bit16_groups, zero.single_partition_of_fp32_groups
    for i in matrix_groups:
        group = zero.real_dp_process_group[i]
        shapes = [p.shape for p in lists[i]]
        muon.layouts[flats[i]] = GroupLayout(shapes, dist.get_rank(group), dist.get_world_size(group), group)


def _parameter_layout(params: Sequence[Any]) -> ParameterLayout:
    group = params[0].ds_process_group
    return ParameterLayout(
        shapes=[p.ds_shape for p in params],
        parts=[p.partition_numel() for p in params],
        rank=dist.get_rank(group),
        world=dist.get_world_size(group),
        group=group,
    )
