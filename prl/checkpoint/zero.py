"""Where a DeepSpeed engine keeps weights and optimizer state on this rank, at ZeRO stages 0 to 3.

The only file that touches DeepSpeed's private attributes (0.19.8). ZeRO flattens the parameters of an
optimizer group into one buffer per rank, of which the optimizer holds state; a `Partition` is that buffer
with the runs of the parameters in it. Stage 0 has one partition per parameter: the parameter itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prl.checkpoint.fragments import ZeroFragment


@dataclass(frozen=True)
class Run:
    """`numel` elements of the flattened parameter `name` from `start` on, at `offset` of a flat buffer."""

    name: str
    shape: tuple[int, ...]
    start: int
    offset: int
    numel: int

    def of(self, buffer: Tensor) -> ZeroFragment:
        held = buffer.detach().view(-1)[self.offset : self.offset + self.numel]
        assert held.numel() == self.numel, f"{self.name}: its buffer is not in memory"
        return ZeroFragment(held, self.shape, self.start)


@dataclass(frozen=True)
class Partition:
    """What the optimizer steps on this rank: `flat`, the key of its state, of optimizer group `group`.

    `runs` has one entry per parameter, empty ones included, so every rank knows the same names.
    """

    flat: Tensor
    group: int
    runs: list[Run]

    @property
    def names(self) -> list[str]:
        return [run.name for run in self.runs]

    def fragments(self, buffer: Tensor) -> dict[str, ZeroFragment]:
        """By parameter name, what of it lies in `buffer`: `flat` or optimizer state of its shape."""
        return {run.name: run.of(buffer) for run in self.runs}


def base_optimizer(engine: Any) -> torch.optim.Optimizer:
    """The optimizer that was handed to DeepSpeed."""
    return engine.optimizer.optimizer if engine.zero_optimization_stage() else engine.optimizer


def partitions(engine: Any) -> list[Partition]:
    """This rank's partitions of all trained parameters, in the same order on every rank.

    Raises ValueError for stage 0 in 16 bit, where the float32 weights are out of reach (use stage 1).
    """
    names = {id(p): name for name, p in engine.module.named_parameters()}
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    if stage == 3:
        return list(_stage3_partitions(optimizer, names))
    if stage and hasattr(optimizer, "fp32_groups_flat_partition"):
        return list(_bf16_partitions(optimizer, names))
    if stage:
        return list(_stage12_partitions(optimizer, names))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ValueError("zero.stage=0 keeps no float32 weights in 16 bit; zero.stage=1 does")
    return [
        Partition(p, group, [Run(names[id(p)], tuple(p.shape), 0, 0, p.numel())])
        for group, options in enumerate(optimizer.param_groups)
        for p in options["params"]
        if p.requires_grad
    ]


def _stage3_partitions(optimizer: Any, names: dict[int, str]) -> Iterator[Partition]:
    for index, (flat, params) in enumerate(
        zip(optimizer.fp32_partitioned_groups_flat, optimizer.fp16_groups, strict=True)
    ):
        sizes = [p.partition_numel() for p in params]
        offsets = itertools.accumulate(sizes, initial=0)
        runs = [_shard_run(p, names[id(p)], offset) for p, offset in zip(params, offsets, strict=False)]
        yield Partition(flat, optimizer.sub_group_to_group_id[index], runs)


def _shard_run(param: nn.Parameter, name: str, offset: int) -> Run:
    """The equal share of a stage-3 parameter that this rank holds; the last shares may be padded."""
    size = param.partition_numel()
    start = min(dist.get_rank(param.ds_process_group) * size, param.ds_numel)
    return Run(name, tuple(param.ds_shape), start, offset, min(size, param.ds_numel - start))


def _stage12_partitions(optimizer: Any, names: dict[int, str]) -> Iterator[Partition]:
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        params = optimizer.round_robin_bit16_groups[group]
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        runs = _slice_runs(params, optimizer.round_robin_bit16_offsets[group], names, rank, flat.numel())
        yield Partition(flat, group, runs)


def _bf16_partitions(optimizer: Any, names: dict[int, str]) -> Iterator[Partition]:
    """Stage 1 with bfloat16 parameters and float32 gradient accumulation is a class of its own."""
    for group, flat in enumerate(optimizer.fp32_groups_flat_partition):
        params = optimizer.bf16_groups[group]
        rank = dist.get_rank(optimizer.real_dp_process_group[group])
        offsets = itertools.accumulate((p.numel() for p in params), initial=0)
        yield Partition(flat, group, _slice_runs(params, offsets, names, rank, flat.numel()))


def _slice_runs(
    params: list[nn.Parameter], offsets: Iterable[int], names: dict[int, str], rank: int, size: int
) -> list[Run]:
    """Runs of `params`, laid out at `offsets`, in slice `rank` of all slices of `size` elements."""
    left, runs = rank * size, []
    for p, offset in zip(params, offsets, strict=False):
        begin, end = max(offset, left), min(offset + p.numel(), left + size)
        held = (begin - offset, begin - left, end - begin) if begin < end else (0, 0, 0)
        runs.append(Run(names[id(p)], tuple(p.shape), *held))
    return runs


def untrained(engine: Any, trained: set[str]) -> dict[str, Tensor]:
    """Frozen parameters, as this rank holds them, and persistent buffers, by name."""
    module: nn.Module = engine.module
    frozen = {name: _frozen(p, name) for name, p in module.named_parameters() if name not in trained}
    return frozen | {
        f"{prefix}.{key}" if prefix else key: buffer
        for prefix, child in module.named_modules()
        for key, buffer in child.named_buffers(recurse=False)
        if key not in child._non_persistent_buffers_set
    }


def _frozen(param: nn.Parameter, name: str) -> Tensor:
    if hasattr(param, "ds_tensor"):
        return _shard_run(param, name, 0).of(param.ds_tensor.data)
    return Run(name, tuple(param.shape), 0, 0, math.prod(param.shape)).of(param.data)


@contextmanager
def loading(engine: Any) -> Iterator[None]:
    """Collective. Within it partitions may be written; at its end the weights that compute follow them."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    if stage == 3:
        optimizer.checkpoint_event_prologue()
    with torch.no_grad():
        yield
        if stage == 3:
            _refresh_stage3(engine)
        elif stage:
            optimizer.update_lp_params()


def _refresh_stage3(engine: Any) -> None:
    for index in range(len(engine.optimizer.fp16_groups)):
        engine.optimizer._reassign_or_swap_out_partitioned_parameters(index)
    for param in engine.module.parameters():
        # DeepSpeed drops hpZ's node-local copies of trained parameters only; frozen ones changed too.
        param.ds_secondary_tensor = None
    engine.optimizer.checkpoint_event_epilogue()
