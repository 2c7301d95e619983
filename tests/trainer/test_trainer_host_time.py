"""What makes a step wait less changes nothing: late verdicts, shared reductions, DeepSpeed's spared work."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_lab import IPO, make_config, make_sequences, pack

from prl.checkpoint.zero import partitions
from prl.config import training
from prl.loss.components import NonFiniteLoss
from prl.records import MicroBatch
from prl.trainer import bf16_step, engine, sharded_norm, stats
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.stats import TokenStats
from prl.trainer.step import train_step

KINDS = ["rl", "ce", "ref_kl", "rl"]
ADAMW = training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01)


def rows_of(seed: int) -> list[MicroBatch]:
    sequences = make_sequences(seed, KINDS)
    return [pack(sequences[:1]), pack(sequences[1:])]


def made(model: Path, world: World, stage: int, dtype: str, max_norm: float | None) -> TrainEngine:
    optim = training.AdamWConfig(**{**vars(ADAMW), "max_norm": max_norm})
    settings = training.TrainerConfig(lm_head_chunk=5, dtype=dtype)
    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    return TrainEngine(make_config(model, optim, zero=zero, trainer=settings), world, None)


def trained(
    model: Path, world: World, stage: int, dtype: str, max_norm: float | None
) -> tuple[list[dict[str, float]], list[torch.Tensor]]:
    engine = made(model, world, stage, dtype, max_norm)
    metrics = [train_step(engine, rows_of(step), IPO, step) for step in range(1, 4)]
    masters = [held.of(part.flat).run.clone() for part in partitions(engine.deepspeed) for held in part.runs]
    engine.close()
    return metrics, masters


@pytest.mark.parametrize("max_norm", [None, 0.05])
@pytest.mark.parametrize(
    ("stage", "dtype"),
    [(1, "bfloat16"), (2, "bfloat16"), (2, "float32"), (3, "bfloat16"), (3, "float32")],
)
def test_the_spared_step_is_deepspeeds_own(
    stage: int,
    dtype: str,
    max_norm: float | None,
    model_dir: Path,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (bf16_step, sharded_norm):
        monkeypatch.setattr(module, "NORM_ELEMENTS", 1000)  # several pieces
    spared, weights = trained(model_dir, world, stage, dtype, max_norm)
    for name in ("spare_the_bf16_step", "spare_the_sharded_norm"):
        monkeypatch.setattr(engine, name, lambda *_: None)
    plain, expected = trained(model_dir, world, stage, dtype, max_norm)
    for key in ("loss/mean", "optim/grad_norm"):
        assert [m[key] for m in spared] == pytest.approx([m[key] for m in plain], rel=1e-5)
    assert all(m["optim/grad_norm"] > 0.05 for m in plain)  # the limit bites
    for mine, other in zip(weights, expected, strict=True):
        if max_norm is None:
            assert torch.equal(mine, other)
        else:  # the norm, and with it the clipping factor, is rounded differently
            assert torch.allclose(mine, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16"), (3, "float32")]
)
def test_a_loss_that_is_not_finite_is_named_before_weights_change(
    stage: int, dtype: str, value: float, model_dir: Path, world: World
) -> None:
    """The second row is bad at one token: -inf has no gradient that would show, NaN spoils all of them."""
    engine = made(model_dir, world, stage, dtype, 1.0)
    before = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    rows = rows_of(1)
    original, calls = engine.deepspeed.module.forward, []

    def forward(input_ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = original(input_ids, *rest)
        calls.append(len(input_ids))
        if len(calls) == 2:
            bad = torch.zeros_like(logprobs)
            bad[rows[1].sequence_lengths[0] - 1] = value
            logprobs = logprobs + bad
        return logprobs, entropy

    engine.deepspeed.module.forward = forward
    with pytest.raises(NonFiniteLoss, match=f"{rows[1].trace_ids[0]}.*logprob is {value}"):
        train_step(engine, rows, IPO, 1)
    after = dict(engine.full_tensors())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    engine.close()


def test_vectors_are_reduced_before_they_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "PENDING_ELEMENTS", 8)
    alone, together = TokenStats(), TokenStats()
    for _ in range(5):
        alone.add("nll", torch.tensor([1.0, math.nan, 4.0]))
        assert len(alone._pending) < 4
    monkeypatch.setattr(stats, "PENDING_ELEMENTS", 1000)
    for _ in range(5):
        together.add("nll", torch.tensor([1.0, math.nan, 4.0]))
    world = World(0, 1, torch.device("cpu"))
    assert len(together._pending) == 5
    assert alone.reduce(world) == together.reduce(world)
    assert together.reduce(world)["nll"][:5] == (10, 25.0, 85.0, 1.0, 4.0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_that_is_not_finite_is_seen_in_a_norm_of_norms(
    stage: int, value: float, model_dir: Path, world: World
) -> None:
    """The loss is fine, one weight's gradient is not: no weight changes."""
    made_engine = made(model_dir, world, stage, "bfloat16", 1.0)
    before = {name: tensor.clone() for name, tensor in made_engine.full_tensors()}
    norm = made_engine.model.model.norm

    def spoil(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        bad = torch.zeros(output.shape[-1], dtype=output.dtype)
        bad[3] = value
        output.register_hook(lambda gradient: gradient + bad)

    norm.register_forward_hook(spoil)
    with pytest.raises(FloatingPointError, match="the gradient's norm is"):
        train_step(made_engine, rows_of(1), IPO, 1)
    after = dict(made_engine.full_tensors())
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    made_engine.close()


def test_a_norm_of_norms_is_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded_norm, "NORM_ELEMENTS", 7)
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(shape, generator=generator) for shape in ((3, 5), (1,), (20,))]
    whole = torch.cat([g.flatten() for g in gradients]).double().norm()
    found = sharded_norm.norms([*gradients[:2], gradients[2].bfloat16()])
    assert len(found) == 3 + 1 + 3 and found.dtype == torch.float32
    assert float(sharded_norm.norms(gradients).norm()) == pytest.approx(float(whole), rel=1e-6)
    assert float(found.norm()) == pytest.approx(float(whole), rel=1e-2)
