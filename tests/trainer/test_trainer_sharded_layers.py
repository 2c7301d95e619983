"""ZeRO 3 by whole layers: one graph for all, plain gradients, and no gathered weight waits for backward."""

from __future__ import annotations

import json
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_exact import ADAMW, KINDS, adamw64
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch.multiprocessing.reductions import StorageWeakRef
from trainer_lab import (
    IPO,
    assert_equal,
    make_config,
    make_model,
    make_sequences,
    pack,
    reference_run,
    run_of_ranks,
    spawn,
    without_a_compiler,
)

from prl.config import training
from prl.trainer import model as policy_model
from prl.trainer.attention import register_packed_attention
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.sharded_layers import _expect_gradient, _forget_weights, layer_buckets
from prl.trainer.step import train_step

RECOMPUTE = ("none", "selective", "full")
STEPS = [make_sequences(seed, KINDS) for seed in range(4)]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def rows_of_ranks(sequences: list[Any], ranks: int) -> list[list[dict[str, Any]]]:
    rows = [pack(sequences[:1]), pack(sequences[1:3]), pack(sequences[3:5]), pack(sequences[5:])]
    return [[asdict(row) for row in rows[rank::ranks]] for rank in range(ranks)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    rows = [rows_of_ranks(s, 2) for s in STEPS]
    common = {"stage": 3, "dtype": "float32", "optim": "adamw", "rows": rows, "compile": True}
    cases = {recompute: {**common, "recompute": recompute} for recompute in RECOMPUTE}
    lora = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"]}
    for stage, compiled in ((1, False), (3, True)):
        cases[f"lora{stage}"] = {**common, "stage": stage, "compile": compiled, "optim": "lora", "lora": lora}
    out = tmp_path_factory.mktemp("pair")
    spawn(out, "zero_worker.py", 2, {"model": str(model_dir), "world": 2, "cases": cases})
    return out


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> dict[str, Any]:
    return reference_run(model_dir, STEPS, adamw64, max_norm=1.0)


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_compiled_layers_on_two_ranks_equal_the_float64_loop(
    recompute: str, pair: Path, reference: dict[str, Any]
) -> None:
    assert_equal(run_of_ranks(pair, recompute), reference)


def test_adapters_of_the_first_layer_learn_where_nothing_before_it_does(pair: Path, model_dir: Path) -> None:
    plain, sharded = (load_file(pair / f"lora{stage}.safetensors") for stage in (1, 3))
    start = load_file(model_dir / "model.safetensors")
    first = "model.layers.0.self_attn.q_proj.weight"
    assert (plain[first] - start[first]).abs().max() > 1e-3
    assert all(torch.allclose(sharded[name], tensor, rtol=0, atol=1e-5) for name, tensor in plain.items())


def test_secondary_partitions_of_half_the_ranks_change_nothing(
    tmp_path: Path, model_dir: Path, reference: dict[str, Any]
) -> None:
    """hpZ over two of four ranks: a layer's weights then come from a part that is not the master's."""
    common = {"stage": 3, "dtype": "float32", "optim": "adamw", "rows": [rows_of_ranks(s, 4) for s in STEPS]}
    cases = {"plain": common, "hpz": {**common, "hpz": 2}}
    spawn(tmp_path, "zero_worker.py", 4, {"model": str(model_dir), "world": 4, "cases": cases})
    plain, hpz = (load_file(tmp_path / f"{name}.safetensors") for name in cases)
    assert all(torch.allclose(hpz[name], tensor, rtol=0, atol=1e-6) for name, tensor in plain.items())
    assert_equal(run_of_ranks(tmp_path, "plain"), reference)


def test_no_gathered_weight_is_there_between_forward_and_backward(tmp_path: Path, model_dir: Path) -> None:
    spawn(tmp_path, "sharded_worker.py", 2, {"model": str(model_dir)})
    found = json.loads((tmp_path / "found.json").read_text())
    assert found == {f"compile={compiled}": {"seen": 22, "held": 0} for compiled in (False, True)}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_all_sharded_layers_share_one_graph(
    recompute: str, tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten of them: dynamo would leave the ninth graph of a function uncompiled."""
    backend = CompileCounterWithBackend("aot_eager")
    for name, stand_in in without_a_compiler(backend).items():
        monkeypatch.setattr(policy_model, name, stand_in)
    settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", recompute=recompute, compile=True)
    zero = training.ZeroConfig(stage=3, param_persistence_threshold=0)
    model = make_model(tmp_path / "model", num_hidden_layers=10)
    engine = TrainEngine(make_config(model, ADAMW, zero=zero, trainer=settings), world, None)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for step in (1, 2):
            train_step(engine, STEPS[0][:1] * 2, IPO, step)
    engine.close()
    assert backend.frame_count == 2 and not counters["graph_break"], "one for layers, one for the norm"


def test_a_layer_that_forward_never_reaches_changes_nothing(model_dir: Path, world: World) -> None:
    """As those of a vision tower, beside which text alone is trained: their backward never comes."""
    from transformers import AutoModelForCausalLM

    settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32")
    found = []
    for stage in (1, 3):
        loaded = AutoModelForCausalLM.from_pretrained(
            model_dir, attn_implementation=register_packed_attention()
        )
        policy = policy_model.make_policy(loaded, settings)
        policy.tower = type(policy.model.layers[0])(policy.config, 0)
        config = make_config(model_dir, ADAMW, zero=training.ZeroConfig(stage=stage), trainer=settings)
        engine = TrainEngine(config, world, None, model=policy)
        metrics = [train_step(engine, [pack(s[:2]), pack(s[2:])], IPO, i) for i, s in enumerate(STEPS, 1)]
        weights = {n: t.clone() for n, t in engine.full_tensors() if not n.startswith("tower")}
        found.append(([m[key] for m in metrics for key in ("loss/mean", "optim/grad_norm")], weights))
        engine.close()
    (expected, weights), (mine, sharded) = found
    assert mine == pytest.approx(expected, rel=1e-5)
    assert all(torch.allclose(sharded[name], tensor, rtol=0, atol=1e-6) for name, tensor in weights.items())


class Half(nn.Module):
    """Uses one weight by halves, as fused projections are, and one as it is."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fused = nn.Parameter(torch.randn(8, 4, generator=generator))
        self.gain = nn.Parameter(torch.randn(4, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.fused.chunk(2)
        return (x * self.gain) @ gate.T * (x @ up.T).tanh()


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_weights_that_come_and_go_give_the_plain_gradients(backend: str | None) -> None:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1), requires_grad=True)
    plain, module = Half(), Half()
    same = x.detach().requires_grad_()
    plain(same).square().sum().backward()
    forward = module.forward if backend is None else torch.compile(module.forward, backend=backend)
    output = _forget_weights(list(module.parameters()), forward, x)
    kept = {weight: weight.detach().clone() for weight in module.parameters()}
    gathered = [StorageWeakRef(weight.untyped_storage()) for weight in kept]
    for weight in kept:
        weight.data = torch.empty(0)
    assert all(storage.expired() for storage in gathered)
    for weight, values in kept.items():
        weight.data = torch.cat([values.new_ones(3), values.flatten()])[3:].view_as(values)
    output.square().sum().backward()
    torch.testing.assert_close(x.grad, same.grad)
    torch.testing.assert_close(module.fused.grad, plain.fused.grad)
    torch.testing.assert_close(module.gain.grad, plain.gain.grad)


def test_backward_without_the_weights_is_an_error() -> None:
    module = Half()
    x = torch.ones(1, 4, requires_grad=True)
    output = _forget_weights(list(module.parameters()), module.forward, x)
    module.fused.data = torch.empty(0)
    with pytest.raises(RuntimeError, match="storage"):
        output.sum().backward()


def test_only_an_input_without_a_gradient_is_given_one() -> None:
    module, frozen, other = nn.Linear(2, 2), torch.ones(2), object()
    made = _expect_gradient(module, (frozen, other), {})
    assert made is not None
    (first, second), _ = made
    assert first.requires_grad and second is other and not frozen.requires_grad
    learned = torch.ones(2, requires_grad=True)
    assert _expect_gradient(module, (learned,), {"mask": other}) == ((learned,), {"mask": other})
    with torch.no_grad():
        assert _expect_gradient(module, (frozen,), {}) is None


def test_an_input_passed_by_name_is_put_first() -> None:
    """To DeepSpeed it would not be there, and backward over before it began."""
    module, learned = nn.Linear(2, 2), torch.ones(2, requires_grad=True)
    named = {"hidden_states": learned, "mask": None}
    assert _expect_gradient(module, (), named) == ((learned,), {"mask": None})
    assert "hidden_states" in named
    for inputs in ((), (None,)):
        with pytest.raises(ValueError, match="zero=3: the input of Linear is not its first argument"):
            _expect_gradient(module, inputs, {"x": learned})


def test_a_layer_is_the_measure_of_what_is_gathered_and_reduced(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model"))
    layer = sum(p.numel() for p in policy.model.layers[0].parameters())
    found = layer_buckets(policy)
    assert found["stage3_prefetch_bucket_size"] == layer
    assert found["reduce_bucket_size"] > layer and found["stage3_max_live_parameters"] > 3 * layer
    large = nn.Module()
    large.layers = nn.ModuleList([type(policy.model.layers[0]).__new__(type(policy.model.layers[0]))])
    nn.Module.__init__(large.layers[0])
    large.layers[0].weight = nn.Parameter(torch.empty(10, 10**8, device="meta"))
    assert set(layer_buckets(large).values()) == {10**9, 3 * 10**9}
    assert layer_buckets(nn.Linear(2, 2)) == {}


def test_a_closed_engine_is_gone(model_dir: Path, world: World) -> None:
    """DeepSpeed keeps its modules in a list and in a cache; a bench makes many engines in one process."""
    config = make_config(model_dir, ADAMW, zero=training.ZeroConfig(stage=3))
    engine = TrainEngine(config, world, None)
    for step in range(1, 4):
        train_step(engine, STEPS[0][:1], IPO, step)
    left = weakref.ref(engine.model), weakref.ref(engine.optimizer)
    engine.close()
    assert [reference() for reference in left] == [None, None]
