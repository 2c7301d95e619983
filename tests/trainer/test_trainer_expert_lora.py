"""Adapters of stacked experts: steps against a float64 loop over W + scaling B A, and what is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_lora import ADAMW, STEPS
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.nn.utils import parametrize
from trainer_lab import IPO, load_reference, make_config, make_moe, pack, reference_steps

from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.expert_lora import AdaptedExperts, expert_adapters, expert_modules, install_expert_adapters
from prl.trainer.lora import adapter_config, install_lora, is_low_rank, peft_config
from prl.trainer.recompute import prepare_layers
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
    losses, norms = reference_steps(model, steps, optimizer)
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


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_changes_nothing(recompute: str, stage: int, moe_dir: Path, world: World) -> None:
    found = []
    for choice in ("none", recompute):
        engine = engine_of(moe_dir, world, stage=stage, recompute=choice)
        rows = [pack(STEPS[0][:2]), pack(STEPS[0][2:])]
        norms = [train_step(engine, rows, IPO, i)["optim/grad_norm"] for i in (1, 2)]
        found.append((norms, low_rank(engine)))
        engine.close()
    (plain, expected), (norms, trained) = found
    assert norms == pytest.approx(plain, rel=1e-5)
    assert all((trained[name] - tensor).abs().max() < 1e-5 for name, tensor in expected.items())


def load(directory: Path, **changes: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="sdpa", **changes).train()


def disturb(policy: torch.nn.Module) -> None:
    """Random B, so that adapters change something."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in policy.named_parameters():
        if ".lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)


def gradients(policy: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    hidden = policy.model(input_ids=torch.arange(10)[None], use_cache=False).last_hidden_state
    hidden.square().sum().backward()
    return hidden.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_layers_compile_once_and_give_the_plain_gradients(recompute: str, tmp_path: Path) -> None:
    """Ten layers: dynamo would leave the ninth graph of a function uncompiled."""
    make_moe(tmp_path, num_hidden_layers=10)
    policies = [load(tmp_path), load(tmp_path)]
    for policy in policies:
        install_lora(policy, training.LoraConfig(rank=3), 0)
        disturb(policy)
    expected_hidden, expected = gradients(policies[0])
    backend = CompileCounterWithBackend("aot_eager")
    prepare_layers(policies[1], training.TrainerConfig(recompute=recompute, compile=True), backend)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        hidden, found = gradients(policies[1])
    assert 1 <= backend.frame_count <= 3 and not counters["graph_break"]
    torch.testing.assert_close(hidden, expected_hidden)
    assert found.keys() == expected.keys() and any("experts.lora_A_up_proj" in name for name in found)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_experts_of_all_layers_have_one_class(moe_dir: Path) -> None:
    policy = load(moe_dir)
    before = {type(module) for module in expert_modules(policy).values()}
    install_lora(policy, LORA, 0)
    after = {type(module) for module in expert_modules(policy).values()}
    assert len(before) == len(after) == 1 and issubclass(after.copy().pop(), before.copy().pop())
    assert after.pop().__name__ == before.pop().__name__


def test_a_is_drawn_as_peft_draws_it(moe_dir: Path) -> None:
    """Uniform within 1 / sqrt(in) for each expert, the same for the same seed; linear layers keep theirs."""
    found = []
    both, one = ["experts", "q_proj"], ["q_proj"]
    for seed, targets in ((0, both), (0, both), (1, one), (0, one)):
        policy = load(moe_dir)
        install_lora(policy, training.LoraConfig(rank=8, targets=targets), seed)
        found.append({name: p.detach() for name, p in policy.named_parameters() if is_low_rank(name)})
    first, second, other, linear = found
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], linear[name]) for name in linear)
    assert not any(torch.equal(other[name], linear[name]) for name in linear if "lora_A" in name)
    for name, stack in first.items():
        if "experts.lora_A" in name:
            bound = stack.shape[-1] ** -0.5
            assert all(0.8 * bound < matrix.abs().max() <= bound for matrix in stack), name
            assert len({float(matrix.sum()) for matrix in stack}) == 4
        elif "experts.lora_B" in name:
            assert not stack.any()


def test_dropout_falls_on_what_an_adapter_reads(moe_dir: Path) -> None:
    policy = load(moe_dir)
    install_expert_adapters(policy, training.LoraConfig(rank=1, alpha=1.0, dropout=0.75))
    experts = next(iter(expert_modules(policy).values()))
    assert isinstance(experts, AdaptedExperts)
    with torch.no_grad():
        experts.lora_A_up_proj.copy_(torch.eye(1, 32).expand(4, 1, 32))
        experts.lora_B_up_proj.fill_(1.0)
        ends = torch.tensor([2, 2, 50, 80], dtype=torch.int32)
        torch.manual_seed(0)
        added = experts._low_rank(torch.ones(80, 32), ends, "up_proj")
        assert set(added.flatten().tolist()) == {0.0, 4.0}, "1 / (1 - 0.75) where it is kept"
        assert 0 < (added[:, 0] == 4).sum() < 40 and torch.equal(added, added[:, :1].expand(80, 16))
        assert torch.equal(experts.eval()._low_rank(torch.ones(80, 32), ends, "up_proj"), torch.ones(80, 16))


def test_bfloat16_adapters_have_float32_masters(moe_dir: Path, world: World) -> None:
    engine = engine_of(moe_dir, world, dtype="bfloat16")
    metrics = train_step(engine, [pack(STEPS[0])], IPO, 1)
    masters = [p for group in engine.optimizer.param_groups for p in group["params"]]
    assert {p.dtype for p in masters} == {torch.float32}
    assert {p.dtype for p in low_rank(engine).values()} == {torch.bfloat16}
    engine.close()
    exact = engine_of(moe_dir, world)
    expected = train_step(exact, [pack(STEPS[0])], IPO, 1)
    exact.close()
    assert metrics["loss/mean"] == pytest.approx(expected["loss/mean"], abs=0.03)
    assert metrics["optim/grad_norm"] == pytest.approx(expected["optim/grad_norm"], rel=0.05)


def test_default_targets_take_attention_and_experts(moe_dir: Path) -> None:
    policy = load(moe_dir)
    install_lora(policy, training.LoraConfig(rank=2), 0)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * (2 * 4 + 6) and all(is_low_rank(name) for name in trained)
    config = adapter_config(policy)
    assert config is not None
    assert config["target_modules"] == ["experts", "k_proj", "o_proj", "q_proj", "v_proj"]
    files = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert peft_config(config)["target_modules"] == files


def test_experts_alone_are_not_published(moe_dir: Path, world: World) -> None:
    engine = engine_of(moe_dir, world, training.LoraConfig(rank=2, publish="adapter"))
    with pytest.raises(ValueError, match=r"set lora\.publish=merged, or leave experts out of lora\.targets"):
        next(engine.adapter_tensors())
    engine.close()
