"""Mixtures of experts: exact steps, what the routers do, and the names under which experts leave."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_trainer_exact import adamw64
from trainer_lab import IPO, make_config, make_sequences, pack, reference_run

from prl.config import training
from prl.orchestrator.packing import _pad, zero_loss_clone
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.routing import RouterWatch
from prl.trainer.step import train_step

ADAMW = training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01)
STEPS = [make_sequences(seed, ["rl", "ce", "ref_kl", "none"]) for seed in range(3)]


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_steps_equal_the_float64_loop(stage: int, moe_dir: Path, world: World) -> None:
    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    engine = TrainEngine(make_config(moe_dir, ADAMW, zero=zero), world, None)
    metrics = [train_step(engine, [pack(s[:2]), pack(s[2:])], IPO, i) for i, s in enumerate(STEPS, 1)]
    engine.close()
    expected = reference_run(moe_dir, STEPS, adamw64, max_norm=1.0)
    assert [m["loss/mean"] for m in metrics] == pytest.approx(expected["losses"], abs=1e-6)
    assert [m["optim/grad_norm"] for m in metrics] == pytest.approx(expected["norms"], rel=1e-4)
    for m in metrics:
        assert 0 <= m["max_vio/min"] <= m["max_vio/median"] <= m["max_vio/max"] <= 4 / 2 - 1
        assert 0.5 < m["routing_confidence/mean"] < 1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_router_statistics_are_those_of_the_definition(moe_dir: Path, world: World, recompute: str) -> None:
    """From the logits of the routers, a token at a time; recomputation does not count twice."""
    settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", recompute=recompute)
    engine = TrainEngine(make_config(moe_dir, ADAMW, trainer=settings), world, None)
    seen: list[list[list[float]]] = []
    for layer in engine.model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: seen.append(out[0].tolist()))
    row = pack(STEPS[0])
    metrics = train_step(engine, [row], IPO, 1)
    engine.close()
    violations, confidences = [], []
    for logits in seen[:2]:
        load = [0] * 4
        for token in logits:
            probabilities = torch.tensor(token).double().softmax(0).tolist()
            best = sorted(range(4), key=lambda e: -probabilities[e])[:2]
            confidences.append(sum(probabilities[e] for e in best))
            for expert in best:
                load[expert] += 1
        mean = sum(load) / 4
        violations.append((max(load) - mean) / mean)
    assert metrics["max_vio/mean"] == pytest.approx(sum(violations) / 2, rel=1e-5)
    assert metrics["max_vio/max"] == pytest.approx(max(violations), rel=1e-5)
    assert metrics["routing_confidence/mean"] == pytest.approx(sum(confidences) / len(confidences), rel=1e-5)


def test_padding_is_in_no_router_statistic(moe_dir: Path, world: World) -> None:
    """It all goes to the same experts: two thirds of the second row are padding."""
    rows = [pack(STEPS[0]), pack(STEPS[0])]
    _pad(rows[1], 2 * len(rows[0]))
    rows[1].input_ids[len(rows[0]) :] = [7] * 2 * len(rows[0])
    found = []
    for row in rows:
        engine = TrainEngine(make_config(moe_dir, ADAMW), world, None)
        metrics = train_step(engine, [row, zero_loss_clone(row)], IPO, 1)
        engine.close()
        found.append({name: value for name, value in metrics.items() if name.startswith(("max_vio", "rout"))})
    assert len(found[0]) == 10
    assert found[1] == pytest.approx(found[0], rel=1e-5)


class TopKRouter(torch.nn.Module):
    """Chooses what it is told to."""

    num_experts = 4

    def forward(self, chosen: torch.Tensor) -> tuple[torch.Tensor, None, torch.Tensor]:
        return torch.zeros(len(chosen), 4).scatter(1, chosen, 10.0), None, chosen


@pytest.mark.parametrize(
    ("part", "real", "loads"),
    [(0, 9, [4, 0, 0, 0]), (0, 3, [3, 0, 0, 0]), (1, 7, [0, 3, 0, 0]), (1, 6, [0, 2, 0, 0]), (1, 4, None)],
)
def test_a_rank_that_shares_rows_counts_its_own_tokens(part: int, real: int, loads: list[int] | None) -> None:
    """Each part of a row is four tokens; the first goes to expert 0, the second to 1."""
    router = TopKRouter()
    watch = RouterWatch(router, part)
    router(torch.full((4, 1), part))
    found = watch.take(real)
    assert (found == {}) is (loads is None)
    if loads is not None:
        assert float(found["max_vio"]) == max(loads) / (sum(loads) / 4) - 1
        assert len(found["routing_confidence"]) == sum(loads)
    assert watch.take(real) == {}, "each forward is told once"


def test_a_dense_model_has_no_routers(model_dir: Path, world: World) -> None:
    engine = TrainEngine(make_config(model_dir, ADAMW), world, None)
    metrics = train_step(engine, [pack(STEPS[0])], IPO, 1)
    engine.close()
    assert not [name for name in metrics if name.startswith(("max_vio", "routing"))]


@pytest.mark.parametrize("stage", [1, 3])
def test_experts_leave_under_the_names_of_files(
    stage: int, moe_dir: Path, world: World, tmp_path: Path
) -> None:
    """What is published is, name by name and bit by bit, what transformers itself saved and can load."""
    from transformers import AutoConfig, AutoModelForCausalLM

    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    engine = TrainEngine(make_config(moe_dir, ADAMW, zero=zero), world, None)
    published = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    engine.close()
    stored = load_file(moe_dir / "model.safetensors")
    assert "model.layers.1.mlp.experts.3.gate_proj.weight" in published
    assert published.keys() == stored.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in stored.items())
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(moe_dir).save_pretrained(tmp_path)
    first, second = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (moe_dir, tmp_path))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)
