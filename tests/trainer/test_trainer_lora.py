"""Adapters: gradients of A and B against a float64 loop, merged weights, what PEFT itself reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrize
from trainer_lab import (
    IPO,
    load_reference,
    make_config,
    make_sequences,
    pack,
    reference_steps,
    sequence_logprobs,
)

from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.lora import adapter_config, adapters
from prl.trainer.step import train_step

LORA = training.LoraConfig(rank=3, alpha=6.0, targets=["q_proj", "v_proj", "down_proj", "not_there"])
ADAMW = training.AdamWConfig(lr=1e-2, betas=[0.9, 0.95], eps=1e-5)
STEPS = [make_sequences(seed, ["rl", "ce", "ref_kl", "none", "rl"]) for seed in range(4)]


class Sum64(torch.nn.Module):
    """W + (alpha / rank) B A, from the definition."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.double()), torch.nn.Parameter(b.double())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + 6.0 / 3 * self.b @ self.a


def start(engine: TrainEngine) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of each layer as the engine begins."""
    with engine._gathered([p for x in adapters(engine.model) for p in (x.a, x.b)], enabled=engine.stage == 3):
        return {x.name: (x.a.detach().clone(), x.b.detach().clone()) for x in adapters(engine.model)}


def reference(directory: Path, initial: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, Any]:
    model = load_reference(directory).requires_grad_(False)
    parts = {}
    for name, (a, b) in initial.items():
        parts[name] = Sum64(a, b)
        parametrize.register_parametrization(model.get_submodule(name), "weight", parts[name])
    params = [p for part in parts.values() for p in part.parameters()]
    optimizer = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    losses, norms = reference_steps(model, STEPS, optimizer)
    return {"losses": losses, "norms": norms, "parts": parts, "model": model}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_train_as_in_the_float64_loop(stage: int, model_dir: Path, world: World) -> None:
    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    engine = TrainEngine(make_config(model_dir, ADAMW, zero=zero, lora=LORA), world, None)
    before = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    initial = start(engine)
    assert {name.rpartition(".")[2] for name in initial} == {"q_proj", "v_proj", "down_proj"}
    assert all(not b.any() and a.any() for a, b in initial.values())
    rows = [[pack(s[:2]), pack(s[2:])] for s in STEPS]
    metrics = [train_step(engine, row, IPO, i) for i, row in enumerate(rows, 1)]
    after = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    alone = {name: tensor.clone() for name, tensor in engine.adapter_tensors()}
    trained = start(engine)
    engine.close()

    expected = reference(model_dir, initial)
    assert [m["loss/mean"] for m in metrics] == pytest.approx(expected["losses"], abs=1e-5)
    assert [m["optim/grad_norm"] for m in metrics] == pytest.approx(expected["norms"], rel=1e-4)
    for name, part in expected["parts"].items():
        a, b = trained[name]
        assert (a - part.a).abs().max() < 2e-5 and (b - part.b).abs().max() < 2e-5, name
        assert torch.equal(alone[f"base_model.model.{name}.lora_A.weight"], a)
        assert torch.equal(alone[f"base_model.model.{name}.lora_B.weight"], b)
        assert (after[f"{name}.weight"] - expected["model"].get_submodule(name).weight).abs().max() < 1e-4
    adapted = {f"{name}.weight" for name in initial}
    assert before.keys() == after.keys() and len(alone) == 2 * len(adapted)
    for name in before:
        assert torch.equal(before[name], after[name]) == (name not in adapted), name


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_under_frozen_layers(recompute: str, model_dir: Path, world: World) -> None:
    gradient_norms = []
    for choice in ("none", recompute):
        settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", recompute=choice)
        engine = TrainEngine(make_config(model_dir, ADAMW, lora=LORA, trainer=settings), world, None)
        rows = [pack(STEPS[0][:2]), pack(STEPS[0][2:])]
        gradient_norms.append(train_step(engine, rows, IPO, 1)["optim/grad_norm"])
        engine.close()
    assert gradient_norms[1] == pytest.approx(gradient_norms[0], rel=1e-5)


def test_peft_reads_what_engines_are_sent(model_dir: Path, world: World, tmp_path: Path) -> None:
    """An adapter directory of the publisher, loaded by PEFT onto the base, computes what the trainer does."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from prl.config.serving import SyncConfig
    from prl.sync.publishers import make_publisher
    from prl.trainer.main import publish

    lora = training.LoraConfig(rank=3, alpha=6.0, targets=["q_proj", "down_proj"], publish="adapter")
    engine = TrainEngine(make_config(model_dir, ADAMW, lora=lora), world, None)
    for step in (1, 2):
        train_step(engine, [pack(STEPS[step])], IPO, step)
    publish(engine, make_publisher(tmp_path, SyncConfig(), 0, world.device), 2)
    row = STEPS[0][0]
    ids, positions = torch.tensor(row.input_ids), torch.arange(len(row))
    with torch.no_grad():
        mine, _ = engine.forward(ids, positions, torch.tensor(row.temperatures), (len(row),))
    engine.close()
    assert {f.name for f in (tmp_path / "step_2").iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, tmp_path / "step_2")
    with torch.no_grad():
        theirs = sequence_logprobs(loaded, row)
        merged = sequence_logprobs(loaded.merge_and_unload(), row)
    torch.testing.assert_close(mine[1:], theirs[1:], rtol=0, atol=1e-5)
    torch.testing.assert_close(merged[1:], theirs[1:], rtol=0, atol=1e-5)


def test_adapters_are_seeded_and_change_nothing_at_first(model_dir: Path, world: World) -> None:
    found = []
    for lora in (LORA, LORA, training.LoraConfig()):
        engine = TrainEngine(make_config(model_dir, ADAMW, lora=lora), world, None)
        ids = torch.tensor(STEPS[0][0].input_ids)
        with torch.no_grad():
            logprobs, _ = engine.forward(ids, torch.arange(len(ids)), torch.ones(len(ids)), (len(ids),))
        found.append((start(engine), logprobs, adapter_config(engine.model)))
        engine.close()
    (first, logprobs, config), (second, *_), (_, plain, none) = found
    assert all(torch.equal(first[name][0], second[name][0]) for name in first)
    assert torch.equal(logprobs, plain) and none is None
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (3, 6.0, "LORA")


def test_targets_that_match_nothing_are_refused(model_dir: Path, world: World) -> None:
    lora = training.LoraConfig(rank=2, targets=["wq"])
    with pytest.raises(
        ValueError, match=r"lora\.targets=\['wq'\]: the model has none of them, but down_proj"
    ):
        TrainEngine(make_config(model_dir, ADAMW, lora=lora), world, None)


def test_bfloat16_adapters_have_float32_masters(model_dir: Path, world: World) -> None:
    settings = training.TrainerConfig(dtype="bfloat16", lm_head_chunk=5)
    engine = TrainEngine(make_config(model_dir, ADAMW, lora=LORA, trainer=settings), world, None)
    metrics = train_step(engine, [pack(STEPS[0])], IPO, 1)
    masters = {p.dtype for group in engine.optimizer.param_groups for p in group["params"]}
    sizes = sum(p.numel() for group in engine.optimizer.param_groups for p in group["params"])
    small = sum(x.a.numel() + x.b.numel() for x in adapters(engine.model))
    assert masters == {torch.float32} and small <= sizes < small + 8
    assert {t.dtype for _, t in engine.full_tensors()} == {torch.bfloat16} and metrics["optim/grad_norm"] > 0
    engine.close()
