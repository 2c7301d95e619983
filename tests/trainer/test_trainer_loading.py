"""Files straight into shards: what each rank reads, the precision of the masters, experts, faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_lab import IPO, make_config, make_model, make_sequences, pack

from prl.checkpoint.fragments import ZeroFragment
from prl.checkpoint.pretrained import holds_float32, read_pretrained
from prl.checkpoint.save import weights
from prl.checkpoint.zero import partitions
from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

ADAMW = training.AdamWConfig(lr=1e-3)


def engine_of(
    directory: Path, world: World, stage: int, dtype: str, *, fields: Any = None, **zero: int
) -> TrainEngine:
    settings = training.TrainerConfig(lm_head_chunk=5, dtype=dtype)
    zero_config = training.ZeroConfig(stage=stage, **zero)
    chosen = {"optim": ADAMW, "trainer": settings, "zero": zero_config} | (fields or {})
    return TrainEngine(make_config(directory, **chosen), world, None)


LORA = training.LoraConfig(rank=2, targets=["q_proj", "up_proj"], modules_to_save=["lm_head"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_hold_exactly_what_the_files_hold(
    stage: int, dtype: str, model_dir: Path, world: World
) -> None:
    """Also where compute is in bfloat16: the masters do not lose what a cast would take."""
    engine = engine_of(model_dir, world, stage, dtype, param_persistence_threshold=0)
    stored = load_file(model_dir / "model.safetensors")
    held = weights(engine.deepspeed, partitions(engine.deepspeed))
    assert {name.removeprefix("model.") for name in held} == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(held[f"model.{name}"].run, tensor.flatten()), name
    for name, tensor in engine.full_tensors():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    engine.close()


@pytest.mark.parametrize("fields", [{}, {"lora": LORA}, {"optim": training.MuonConfig(lr=0.01)}])
def test_stage_3_never_has_the_whole_model(
    fields: dict[str, Any], model_dir: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer's parameters are taken apart before the next layer exists, and files are read by slices."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    whole = []
    build = Qwen3DecoderLayer.__init__

    def watch(self: torch.nn.Module, *args: object) -> None:
        build(self, *args)
        whole.append(sum(p.numel() for p in self.parameters()))

    monkeypatch.setattr(Qwen3DecoderLayer, "__init__", watch)
    monkeypatch.setattr(
        "transformers.AutoModelForCausalLM.from_pretrained", lambda *_, **__: pytest.fail("loaded whole")
    )
    engine = engine_of(model_dir, world, 3, "float32", fields=fields, param_persistence_threshold=0)
    stored = load_file(model_dir / "model.safetensors")
    for name, tensor in engine.full_tensors():
        assert torch.equal(tensor, stored[name]), name
    engine.close()
    assert whole == [0, 0]


def test_rotary_frequencies_stay_float32_where_parameters_are_sharded_as_built(
    model_dir: Path, world: World
) -> None:
    """zero.Init would turn them into bfloat16."""
    engine = engine_of(model_dir, world, 3, "bfloat16")
    rotary = engine.model.model.rotary_emb
    assert rotary.inv_freq.dtype == torch.float32
    exact = 1e4 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(rotary.inv_freq.double(), exact, rtol=1e-6, atol=0)
    engine.close()


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_with_a_padding_token_is_built_in_shards(tied: bool, tmp_path: Path, world: World) -> None:
    """Its embedding has a row that transformers sets to zero, of which a shard may have nothing."""
    padded = make_model(tmp_path / "padded", tied=tied, pad_token_id=3)
    stored = load_file(padded / "model.safetensors")
    micro_batches = [pack(make_sequences(0, ["rl", "rl"]))]
    after = []
    for stage in (0, 3):
        fields = {"optim": training.AdamWConfig(lr=1e-3, eps=1e-5)}
        engine = engine_of(padded, world, stage, "float32", fields=fields, param_persistence_threshold=0)
        head, embedding = engine.model.get_output_embeddings(), engine.model.get_input_embeddings()
        assert (head.weight is embedding.weight) is tied
        for name, tensor in engine.full_tensors():
            assert torch.equal(tensor, stored[name]), name
        train_step(engine, micro_batches, IPO, 1)
        after.append({name: tensor.clone() for name, tensor in engine.full_tensors()})
        engine.close()
    whole, sharded = after
    assert all(torch.allclose(sharded[name], tensor, rtol=0, atol=1e-6) for name, tensor in whole.items())
    assert any(not torch.equal(tensor, stored[name]) for name, tensor in whole.items())


@pytest.mark.parametrize("tied", [True, False])
def test_the_row_of_a_padding_token_is_zero_in_random_shards(
    tied: bool, tmp_path: Path, world: World
) -> None:
    padded = make_model(tmp_path / "padded", tied=tied, pad_token_id=3)
    config = make_config(padded, ADAMW, zero=training.ZeroConfig(stage=3, param_persistence_threshold=0))
    config.model.random_init = True
    engine = TrainEngine(config, world, None)
    embedding = dict(engine.full_tensors())["model.embed_tokens.weight"]
    assert bool((embedding[3] == 0).all()) and bool((embedding[[0, 1, 2, 4]] != 0).all())
    engine.close()


@pytest.mark.parametrize("optim", [ADAMW, training.MuonConfig(lr=0.01)])
def test_only_the_first_layers(optim: training.OptimConfig, model_dir: Path, world: World) -> None:
    config = make_config(model_dir, optim, zero=training.ZeroConfig(stage=3))
    config.model.num_layers = 1
    engine = TrainEngine(config, world, None)
    stored = load_file(model_dir / "model.safetensors")
    found = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    assert found.keys() == {name for name in stored if ".layers.1." not in name}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.items())
    assert train_step(engine, [pack(make_sequences(0, ["rl"]))], IPO, 1)["optim/grad_norm"] > 0
    engine.close()


@pytest.mark.parametrize("seed", [0, 1])
def test_random_weights_at_stage_3_are_drawn_in_shards(
    seed: int, model_dir: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No layer is whole once it is built; the weights come from the seed, norms begin as ones."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    whole, original = [], Qwen3DecoderLayer.__init__

    def watch(layer: Qwen3DecoderLayer, *args: object, **kwargs: object) -> None:
        original(layer, *args, **kwargs)
        whole.append(sum(p.numel() for p in layer.parameters()))

    monkeypatch.setattr(Qwen3DecoderLayer, "__init__", watch)
    drawn = []
    for chosen in (0, seed):
        zero = training.ZeroConfig(stage=3, param_persistence_threshold=0)
        config = make_config(model_dir, ADAMW, zero=zero)
        config.model.random_init, config.seed = True, chosen
        engine = TrainEngine(config, world, None)
        drawn.append({name: tensor.clone() for name, tensor in engine.full_tensors()})
        engine.close()
    assert set(whole) == {0}
    matrices = {name: tensor for name, tensor in drawn[0].items() if tensor.dim() == 2}
    assert all(0.08 < float(t.std()) < 0.12 for t in matrices.values()), "initializer_range is 0.1"
    assert all(bool((t == 1).all()) for name, t in drawn[0].items() if name not in matrices)
    assert all(torch.equal(t, drawn[1][name]) == (seed == 0) for name, t in matrices.items())


def test_any_run_of_a_tensor_is_read(tmp_path: Path) -> None:
    tensor = torch.randn(5, 4, 3)
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    for start, stop in ((0, 60), (7, 8), (11, 50), (13, 13), (59, 60)):
        run = torch.full((stop - start,), torch.nan, dtype=torch.float64)
        read_pretrained(tmp_path, {"model.a": ZeroFragment(run, (5, 4, 3), start)}, {"model_type": "x"})
        assert torch.equal(run, tensor.flatten()[start:stop].double())


def test_runs_of_stacked_experts_are_put_together(tmp_path: Path) -> None:
    experts = {f"l.experts.{e}.{p}_proj.weight": torch.randn(2, 3) for e in range(3) for p in ("gate", "up")}
    save_file(experts, tmp_path / "model.safetensors")
    stack = torch.stack(
        [torch.cat([experts[f"l.experts.{e}.{p}_proj.weight"] for p in ("gate", "up")]) for e in range(3)]
    )
    for start, stop in ((0, 36), (5, 20), (12, 13), (30, 36)):
        run = torch.full((stop - start,), torch.nan)
        target = {"model.l.experts.gate_up_proj": ZeroFragment(run, (3, 4, 3), start)}
        read_pretrained(tmp_path, target, {"model_type": "qwen3_moe"})
        assert torch.equal(run, stack.flatten()[start:stop])


def test_faults_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="has no weights b, which the model needs"):
        read_pretrained(tmp_path, {"model.b": ZeroFragment(torch.zeros(4), (2, 2), 0)}, {"model_type": "x"})
    with pytest.raises(ValueError, match=r"a has shape \(2, 2\), the model needs \(4,\)"):
        read_pretrained(tmp_path, {"model.a": ZeroFragment(torch.zeros(4), (4,), 0)}, {"model_type": "x"})


def test_what_is_more_precise_than_16_bits(tmp_path: Path) -> None:
    assert not holds_float32(tmp_path)
    save_file({"a": torch.zeros(2).bfloat16()}, tmp_path / "model.safetensors")
    assert not holds_float32(tmp_path)
    save_file({"a": torch.zeros(2).bfloat16(), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert holds_float32(tmp_path)
