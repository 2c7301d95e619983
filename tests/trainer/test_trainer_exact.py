"""One rank, every ZeRO stage and optimizer, against a plain float64 loop over lone sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_lab import (
    IPO,
    assert_equal,
    make_config,
    make_sequences,
    pack,
    reference_run,
)

from prl.config import training
from prl.config.schema import RlConfig
from prl.records import MicroBatch
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

KINDS = ["rl", "rl", "ce", "weighted", "ref_kl", "none", "rl", "ce"]
ADAMW = training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01)


def adamw64(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.01)


def rows_of(sequences: list[MicroBatch]) -> list[MicroBatch]:
    """Three ragged rows."""
    return [pack(sequences[:3]), pack(sequences[3:6]), pack(sequences[6:])]


def run(config: RlConfig, world: World, steps: list[list[MicroBatch]]) -> dict[str, Any]:
    engine = TrainEngine(config, world, len(steps))
    metrics = [train_step(engine, rows_of(s), IPO, i) for i, s in enumerate(steps, 1)]
    weights = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    engine.close()
    return {
        "losses": [m["loss/mean"] for m in metrics],
        "norms": [m["optim/grad_norm"] for m in metrics],
        "weights": weights,
        "metrics": metrics,
    }


@pytest.fixture(scope="module")
def steps() -> list[list[MicroBatch]]:
    return [make_sequences(seed, KINDS) for seed in range(20)]


@pytest.fixture(scope="module")
def reference(model_dir: Path, steps: list[list[MicroBatch]]) -> dict[str, Any]:
    return reference_run(model_dir, steps, adamw64, max_norm=1.0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_twenty_steps_equal_the_reference(
    stage: int, model_dir: Path, world: World, steps: list[list[MicroBatch]], reference: dict[str, Any]
) -> None:
    config = make_config(
        model_dir, ADAMW, zero=training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    )
    mine = run(config, world, steps)
    assert_equal(mine, reference)
    assert max(reference["norms"]) > 1.0, "clipping must have acted, and the norm be that before it"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_untied_head_and_no_clipping(stage: int, untied_dir: Path, world: World) -> None:
    """Without max_norm nothing is clipped, though DeepSpeed's own default is 1.0."""
    steps = [make_sequences(seed, KINDS) for seed in range(3)]
    optim = training.SgdConfig(lr=0.02, momentum=0.9, nesterov=True, max_norm=None)
    mine = run(make_config(untied_dir, optim, zero=training.ZeroConfig(stage=stage)), world, steps)

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)

    reference = reference_run(untied_dir, steps, sgd, max_norm=None)
    assert min(reference["norms"]) > 1.0
    assert_equal(mine, reference)


class Muon64:
    """Muon and AdamW on a model's float64 parameters, by singular values."""

    def __init__(self, model: torch.nn.Module) -> None:
        outer = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        self.matrices = [p for p in model.parameters() if p.dim() == 2 and id(p) not in outer]
        rest = [p for p in model.parameters() if p.dim() != 2 or id(p) in outer]
        self.adam = torch.optim.AdamW(rest, lr=1e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        self.momenta = [torch.zeros_like(p) for p in self.matrices]
        self.param_groups = [{"lr": 0.01}, *self.adam.param_groups]

    def zero_grad(self) -> None:
        for p in self.matrices:
            p.grad = None
        self.adam.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        self.adam.step()
        for p, momentum in zip(self.matrices, self.momenta, strict=True):
            momentum.mul_(0.95).add_(p.grad)
            update = p.grad + 0.95 * momentum
            u, s, v = torch.linalg.svd(update / update.norm(), full_matrices=False)
            for _ in range(5):
                s = 3.4445 * s - 4.775 * s**3 + 2.0315 * s**5
            p.sub_(0.01 * max(1, p.shape[0] / p.shape[1]) ** 0.5 * (u @ torch.diag(s) @ v))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_muon_is_exact_at_every_stage(stage: int, model_dir: Path, world: World) -> None:
    steps = [make_sequences(seed, KINDS) for seed in range(3)]
    optim = training.MuonConfig(lr=0.01, adam_lr=1e-3, eps=1e-5)
    mine = run(make_config(model_dir, optim, zero=training.ZeroConfig(stage=stage)), world, steps)
    reference = reference_run(model_dir, steps, Muon64, max_norm=1.0)
    assert mine["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    for name, weight in reference["weights"].items():
        assert (mine["weights"][name] - weight).abs().max() < 3e-5, name


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_changes_nothing(
    stage: int, model_dir: Path, world: World, steps: list[list[MicroBatch]]
) -> None:
    zero = training.ZeroConfig(stage=stage, offload_optimizer=True, offload_parameters=stage == 3)
    mine = run(make_config(model_dir, ADAMW, zero=zero), world, steps[:3])
    assert_equal(mine, reference_run(model_dir, steps[:3], adamw64, max_norm=1.0))


def test_the_schedule_acts_and_the_reported_rate_is_the_one_used(
    model_dir: Path, world: World, steps: list[list[MicroBatch]]
) -> None:
    scheduler = training.LinearConfig(warmup_steps=2, decay_steps=3, min_lr=1e-4)
    mine = run(make_config(model_dir, ADAMW, scheduler=scheduler), world, steps[:6])
    factors = [0.1, 0.55, 1.0, 1.0, 0.55, 0.1]
    assert [m["optim/lr"] for m in mine["metrics"]] == pytest.approx([1e-3 * f for f in factors])
    reference = reference_run(
        model_dir, steps[:6], adamw64, max_norm=1.0, factor=lambda step: factors[step - 1]
    )
    assert_equal(mine, reference)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_gives_the_same_gradient(stage: int, model_dir: Path, world: World) -> None:
    """The same eight sequences in 1, 2, 4 and 8 rows: four steps of plain SGD show four equal gradients."""
    sequences = make_sequences(0, KINDS)
    optim = training.SgdConfig(lr=0.01, momentum=0.0, nesterov=False, max_norm=None)
    engine = TrainEngine(make_config(model_dir, optim, zero=training.ZeroConfig(stage=stage)), world, None)
    losses = []
    for step, count in enumerate((1, 2, 4, 8), 1):
        size = 8 // count
        rows = [pack(sequences[i * size : (i + 1) * size]) for i in range(count)]
        losses.append(train_step(engine, rows, IPO, step)["loss/mean"])
    mine = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    engine.close()

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    reference = reference_run(model_dir, [sequences] * 4, sgd, max_norm=None)
    assert losses == pytest.approx(reference["losses"], abs=1e-6)
    for name, weight in reference["weights"].items():
        assert (mine[name] - weight).abs().max() < 2e-6, name


def frozen_head64(model: torch.nn.Module) -> torch.optim.Optimizer:
    model.lm_head.requires_grad_(False)
    return adamw64(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_frozen_head_trains_the_rest(stage: int, untied_dir: Path, world: World) -> None:
    from prl.trainer.model import load_policy

    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    config = make_config(untied_dir, ADAMW, zero=zero)
    model = load_policy(config.model, config.trainer, world.device, seed=0)
    model.lm_head.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine = TrainEngine(config, world, None, model=model)
    sequences = make_sequences(0, KINDS)
    metrics = train_step(engine, rows_of(sequences), IPO, 1)
    after = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    engine.close()
    expected = reference_run(untied_dir, [sequences], frozen_head64, max_norm=1.0)
    assert metrics["loss/mean"] == pytest.approx(expected["losses"][0], abs=1e-6)
    assert metrics["optim/grad_norm"] == pytest.approx(expected["norms"][0], rel=1e-4)
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    for name, weight in expected["weights"].items():
        assert (after[name] - weight).abs().max() < 1e-5, name


def test_stage_0_in_bfloat16_counts_adams_steps_right(model_dir: Path, world: World) -> None:
    """DeepSpeed's own stage 0 would make an empty step while it is built."""
    settings = training.TrainerConfig(dtype="bfloat16", lm_head_chunk=5)
    config = make_config(model_dir, ADAMW, trainer=settings, zero=training.ZeroConfig(stage=0))
    engine = TrainEngine(config, world, None)
    train_step(engine, rows_of(make_sequences(0, KINDS)), IPO, 1)
    counts = {int(state["step"]) for state in engine.optimizer.state.values()}
    assert engine.stage == 1 and counts == {1}
    engine.close()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_computes_near_the_reference_with_float32_masters(
    stage: int, model_dir: Path, world: World, steps: list[list[MicroBatch]], reference: dict[str, Any]
) -> None:
    settings = training.TrainerConfig(dtype="bfloat16", lm_head_chunk=5)
    config = make_config(model_dir, ADAMW, trainer=settings, zero=training.ZeroConfig(stage=stage))
    engine = TrainEngine(config, world, None)
    rotary = engine.model.model.rotary_emb.inv_freq
    assert rotary.dtype == torch.float32
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]} - {torch.float32}
    assert not masters
    losses = [train_step(engine, rows_of(s), IPO, i)["loss/mean"] for i, s in enumerate(steps[:2], 1)]
    assert losses == pytest.approx(reference["losses"][:2], abs=0.05)
    assert {t.dtype for _, t in engine.full_tensors()} == {torch.bfloat16}
    engine.close()


def test_a_spoiled_gradient_ends_the_run(model_dir: Path, world: World) -> None:
    config = make_config(model_dir, ADAMW)
    engine = TrainEngine(config, world, None)
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(torch.nan)
    row = pack(make_sequences(0, ["none", "none"]))
    lengths = tuple(row.sequence_lengths)
    ids, positions = torch.tensor(row.input_ids), torch.tensor(row.position_ids)
    logprobs, _ = engine.forward(ids, positions, torch.ones(len(row)), lengths)
    engine.backward(logprobs.sum())
    with pytest.raises(FloatingPointError, match="step 7"):
        engine.step(7)
    engine.close()


def test_full_tensors_have_hugging_face_names_and_gather_in_buckets(
    model_dir: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file

    monkeypatch.setattr("prl.trainer.engine.GATHER_ELEMENTS", 3000)
    stored = load_file(model_dir / "model.safetensors")
    config = make_config(model_dir, ADAMW, zero=training.ZeroConfig(stage=3, param_persistence_threshold=0))
    engine = TrainEngine(config, world, None)
    gathered, gather = [], engine._gathered
    engine._gathered = lambda params, **options: gathered.append(len(params)) or gather(params, **options)
    found = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    assert len(gathered) > 3 and sum(gathered) == len(found)
    assert found.keys() == stored.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())
    engine.close()
