"""Learning-rate schedules as pure functions of the step, so there is no state to save or to restore.

A schedule gives the factor on the peak learning rate; every parameter group multiplies its own peak by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prl.config.training import CosineConfig, LinearConfig, SchedulerConfig

Schedule = Callable[[int], float]
"""Step (from 1) -> factor on the peak learning rate for that step's update."""

FIRST_FACTOR = 1e-8
"""Where a warm-up starts when `min_lr` is 0."""


def build_schedule(config: SchedulerConfig, lr: float, max_steps: int | None) -> Schedule:
    """The schedule of `config` for peak `lr` over `max_steps`. Raises ValueError where it does not fit."""
    if isinstance(config, LinearConfig):
        return _linear(config, lr, max_steps)
    if isinstance(config, CosineConfig):
        return _cosine(config, lr, max_steps)
    return lambda step: 1.0


def _linear(config: LinearConfig, lr: float, max_steps: int | None) -> Schedule:
    warmup, decay = config.warmup_steps, config.decay_steps
    if warmup == decay == 0:
        raise ValueError("scheduler=linear: warmup_steps and decay_steps are both 0; use scheduler=constant")
    if decay and max_steps is None:
        raise ValueError(f"scheduler.decay_steps={decay} needs max_steps; set max_steps or decay_steps=0")
    if max_steps is not None and warmup + decay > max_steps:
        raise ValueError(
            f"scheduler.warmup_steps + decay_steps = {warmup + decay} exceeds max_steps={max_steps}"
        )
    low = _lowest(config.min_lr, lr) or FIRST_FACTOR
    decay_start = (max_steps or 0) - decay

    def factor(step: int) -> float:
        done = step - 1
        if done < warmup:
            return low + (1 - low) * done / warmup
        if decay and done >= decay_start:
            return 1 - (1 - low) * min((done - decay_start) / max(decay - 1, 1), 1.0)
        return 1.0

    return factor


def _cosine(config: CosineConfig, lr: float, max_steps: int | None) -> Schedule:
    warmup = config.warmup_steps
    if max_steps is None:
        raise ValueError("scheduler=cosine needs max_steps; set max_steps or use scheduler=constant")
    if warmup >= max_steps:
        raise ValueError(f"scheduler.warmup_steps={warmup} must be below max_steps={max_steps}")
    low = _lowest(config.min_lr, lr)
    first = low or FIRST_FACTOR

    def factor(step: int) -> float:
        done = step - 1
        if done < warmup:
            return first + (1 - first) * done / warmup
        share = min((done - warmup) / (max_steps - warmup), 1.0)
        return low + (1 - low) * (1 + math.cos(math.pi * share)) / 2

    return factor


def _lowest(min_lr: float, lr: float) -> float:
    """`min_lr` as a factor of the peak."""
    if min_lr > lr:
        raise ValueError(f"scheduler.min_lr={min_lr} exceeds optim.lr={lr}")
    return min_lr / lr if lr else 0.0
