"""Adapters of stacked experts: steps against a float64 loop over W + scaling B A, and what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_lora import ADAMW, STEPS
from torch.nn.utils import parametrize
from trainer_lab import IPO, load_reference, make_config, make_moe, pack, reference_loss

from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.expert_lora import AdaptedExperts, expert_adapters
from prl.trainer.lora import adapter_config, is_low_rank, peft_config
from prl.trainer.step import train_step

LORA = training.LoraConfig(rank=3, alpha=6.0, targets=["experts", "not_there"])
PARTS = {"gate_up_proj": ["gate_proj", "up_proj"], "down_proj": ["down_proj"]}
FLOAT32 = {"lm_head_chunk": 5, "dtype": "float32"}


class Stack64(torch.nn.Module):
    """Expert by expert and projection by projection: W + (alpha / rank) B A."""

    def __init__(self, sides: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.a = torch.nn.ParameterList([a.double() for a, _ in sides])
        self.b = torch.nn.ParameterList([b.double() for _, b in sides])

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        experts = []
        for n, matrix in enumerate(weight):
            added = [b[n] @ a[n] for a, b in zip(self.a, self.b, strict=True)]
            experts.append(matrix + 6.0 / 3 * torch.cat(added))
        return torch.stack(experts)


def engine_of(model: Path, world: World, lora: training.LoraConfig = LORA, stage: int = 0, **trainer: Any):
    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    settings = training.TrainerConfig(**{**FLOAT32, **trainer})
    return TrainEngine(make_config(model, ADAMW, zero=zero, lora=lora, trainer=settings), world, None)


def low_rank(engine: TrainEngine) -> dict[str, torch.Tensor]:
    """Every A and B of the experts, whole."""
    named = {n: p for x in expert_adapters(engine.model) for n, p in x.stacks.items()}
    with engine._gathered(list(named.values()), enabled=engine.stage == 3):
        return {name: p.detach().clone() for name, p in named.items()}


def clones(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_tensors()}


def reference(directory: Path, initial: dict[str, torch.Tensor], steps: list[Any]) -> dict[str, Any]:
    """Losses, norms, A and B by name, and the merged stacks of the plain loop."""
    model = load_reference(directory).requires_grad_(False)
    trained, merged = {}, {}
    for layer in range(2):
        path = f"model.layers.{layer}.mlp.experts"
        for stack, parts in PARTS.items():
            sides = [(initial[f"{path}.lora_A_{p}"], initial[f"{path}.lora_B_{p}"]) for p in parts]
            module = Stack64(sides)
            parametrize.register_parametrization(model.get_submodule(path), stack, module)
            trained |= {f"{path}.lora_A_{p}": a for p, a in zip(parts, module.a, strict=True)}
            trained |= {f"{path}.lora_B_{p}": b for p, b in zip(parts, module.b, strict=True)}
            merged[f"{path}.{stack}"] = (model.get_submodule(path), stack)
    params = list(trained.values())
    optimizer = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    losses, norms = [], []
    for sequences in steps:
        optimizer.zero_grad()
        loss = reference_loss(model, sequences)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(params, 1.0)))
        optimizer.step()
        losses.append(float(loss.detach()))
    weights = {name: getattr(module, stack).detach() for name, (module, stack) in merged.items()}
    return {"losses": losses, "norms": norms, "trained": trained, "weights": weights}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_steps_equal_the_float64_loop(stage: int, moe_dir: Path, world: World) -> None:
    engine = engine_of(moe_dir, world, stage=stage)
    before, initial = clones(engine), low_rank(engine)
    rows = [[pack(s[:2]), pack(s[2:])] for s in STEPS]
    metrics = [train_step(engine, row, IPO, i) for i, row in enumerate(rows, 1)]
    after, trained = clones(engine), low_rank(engine)
    engine.close()
    expected = reference(moe_dir, initial, STEPS)
    assert [m["loss/mean"] for m in metrics] == pytest.approx(expected["losses"], abs=1e-5)
    assert [m["optim/grad_norm"] for m in metrics] == pytest.approx(expected["norms"], rel=1e-4)
    assert trained.keys() == expected["trained"].keys() and len(trained) == 2 * 6
    for name, tensor in expected["trained"].items():
        assert (trained[name] - tensor).abs().max() < 5e-5, name
    stored = load_file(moe_dir / "model.safetensors")
    assert after.keys() == before.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(before[name], tensor), f"{name}: adapters change nothing at first"
        assert torch.equal(after[name], tensor) is (".experts." not in name), name
    for name, stack in expected["weights"].items():
        path, kind = name.rsplit(".", 1)
        for n, matrix in enumerate(stack):
            published = [after[f"{path}.{n}.{part}.weight"] for part in PARTS[kind]]
            assert (torch.cat(published) - matrix).abs().max() < 2e-4, (name, n)
