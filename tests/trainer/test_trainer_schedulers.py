"""Schedules as tables, and against torch's own schedulers."""

from __future__ import annotations

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from prl.config.training import CosineConfig, LinearConfig, SchedulerConfig
from prl.trainer.schedulers import build_schedule


def rates_by_torch(make_scheduler: object, steps: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = make_scheduler(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def test_constant() -> None:
    schedule = build_schedule(SchedulerConfig(), 1e-3, None)
    assert [schedule(step) for step in (1, 7, 10**6)] == [1.0] * 3


def test_linear_table() -> None:
    schedule = build_schedule(LinearConfig(warmup_steps=2, decay_steps=3, min_lr=0.1), 1.0, 7)
    assert [round(schedule(step), 6) for step in range(1, 9)] == [0.1, 0.55, 1, 1, 1, 0.55, 0.1, 0.1]


def test_linear_equals_warmup_stable_decay_of_torch() -> None:
    low, warmup, decay, steps = 1e-8, 4, 5, 20

    def torch_schedule(optimizer: torch.optim.Optimizer) -> SequentialLR:
        phases = [
            LinearLR(optimizer, low, 1.0, warmup),
            ConstantLR(optimizer, 1.0, 1),
            LinearLR(optimizer, 1.0, low, decay - 1),
        ]
        return SequentialLR(optimizer, phases, [warmup, steps - decay])

    schedule = build_schedule(LinearConfig(warmup_steps=warmup, decay_steps=decay), 1.0, steps)
    mine = [schedule(step) for step in range(1, steps + 1)]
    assert mine == pytest.approx(rates_by_torch(torch_schedule, steps), abs=1e-7)


def test_warmup_without_decay_needs_no_end() -> None:
    schedule = build_schedule(LinearConfig(warmup_steps=2, decay_steps=0), 1.0, None)
    assert schedule(1) == 1e-8 and schedule(3) == schedule(10**6) == 1.0


def test_one_step_of_decay_is_at_the_peak() -> None:
    schedule = build_schedule(LinearConfig(warmup_steps=0, decay_steps=1), 1.0, 3)
    assert [schedule(step) for step in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_cosine_equals_torch_after_the_warmup() -> None:
    warmup, steps, peak, low = 3, 15, 2.0, 0.2
    schedule = build_schedule(CosineConfig(warmup_steps=warmup, min_lr=low), peak, steps)

    def cosine(optimizer: torch.optim.Optimizer) -> CosineAnnealingLR:
        return CosineAnnealingLR(optimizer, steps - warmup, low)

    mine = [peak * schedule(step) for step in range(warmup + 1, steps + 1)]
    assert mine == pytest.approx(rates_by_torch(cosine, steps - warmup, peak), rel=1e-9)
    assert [round(schedule(step), 6) for step in (1, 2, 3)] == [0.1, 0.4, 0.7]


@pytest.mark.parametrize(
    ("config", "lr", "max_steps", "words"),
    [
        (LinearConfig(warmup_steps=0, decay_steps=0), 1.0, 10, "scheduler=constant"),
        (LinearConfig(warmup_steps=1, decay_steps=2), 1.0, None, "decay_steps=2 needs max_steps"),
        (LinearConfig(warmup_steps=6, decay_steps=5), 1.0, 10, "11 exceeds max_steps=10"),
        (LinearConfig(min_lr=0.5), 0.1, 30, "min_lr=0.5 exceeds optim.lr=0.1"),
        (CosineConfig(), 1.0, None, "cosine needs max_steps"),
        (CosineConfig(warmup_steps=10), 1.0, 10, "must be below max_steps=10"),
    ],
)
def test_what_does_not_fit_is_refused(
    config: SchedulerConfig, lr: float, max_steps: int | None, words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        build_schedule(config, lr, max_steps)
