"""`lora.modules_to_save`: trained in full beside adapters, saved with them, merged or read by PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_lora import ADAMW, STEPS, Sum64, start
from torch.nn.utils import parametrize
from trainer_lab import (
    IPO,
    load_reference,
    make_config,
    make_model,
    pack,
    reference_steps,
    sequence_logprobs,
)

from prl.checkpoint.export import export
from prl.checkpoint.load import load_trainer
from prl.checkpoint.marker import mark_complete
from prl.checkpoint.reader import CheckpointReader
from prl.checkpoint.save import save_trainer
from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.lora import adapter_config, saved_modules
from prl.trainer.step import train_step

BOTH = {True: ["model.embed_tokens.weight"], False: ["lm_head.weight", "model.norm.weight"]}
"""By whether the model is tied: what is trained of it in full."""


def lora(tied: bool, **fields: Any) -> training.LoraConfig:
    modules = ["lm_head"] if tied else ["lm_head", "model.norm"]
    settings = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"], "modules_to_save": modules}
    return training.LoraConfig(**{**settings, **fields})


def engine_of(
    model: Path, world: World, stage: int, adapters: training.LoraConfig, dtype: str = "float32"
) -> TrainEngine:
    zero = training.ZeroConfig(stage=stage, param_persistence_threshold=0)
    settings = training.TrainerConfig(lm_head_chunk=5, dtype=dtype)
    return TrainEngine(make_config(model, ADAMW, zero=zero, lora=adapters, trainer=settings), world, None)


def rows(step: int) -> list[Any]:
    return [pack(STEPS[step][:2]), pack(STEPS[step][2:])]


def clones(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_tensors()}


def reference(directory: Path, initial: Any, whole: list[str]) -> tuple[list[float], Any]:
    """(losses, model) of the float64 loop over A, B and the parameters `whole`."""
    model = load_reference(directory).requires_grad_(False)
    params = [model.get_parameter(name).requires_grad_() for name in whole]
    for name, (a, b) in initial.items():
        part = Sum64(a, b)
        parametrize.register_parametrization(model.get_submodule(name), "weight", part)
        params += list(part.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-2, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
    losses, _ = reference_steps(model, STEPS, optimizer)
    return losses, model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_they_train_as_in_the_float64_loop(
    stage: int, tied: bool, model_dir: Path, untied_dir: Path, world: World
) -> None:
    directory = model_dir if tied else untied_dir
    engine = engine_of(directory, world, stage, lora(tied))
    before, initial = clones(engine), start(engine)
    metrics = [train_step(engine, rows(i), IPO, i + 1) for i in range(len(STEPS))]
    after = clones(engine)
    engine.close()
    losses, model = reference(directory, initial, BOTH[tied])
    assert [m["loss/mean"] for m in metrics] == pytest.approx(losses, abs=1e-5)
    for name in BOTH[tied]:
        assert (after[name] - model.get_parameter(name)).abs().max() < 5e-5, name
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert changed == {f"{name}.weight" for name in initial} | set(BOTH[tied])


@pytest.fixture(scope="module", params=[(True, 3), (False, 1)], ids=["tied-3", "untied-1"])
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, world: World
) -> dict[str, Any]:
    """A checkpoint of two steps, what engines would have got, and logprobs of one sequence."""
    tied, stage = request.param
    out = tmp_path_factory.mktemp("saved")
    model = make_model(out / "model", tied=tied)
    engine = engine_of(model, world, stage, lora(tied))
    for step in (1, 2):
        train_step(engine, rows(step), IPO, step)
    path = out / "step_2" / "trainer"
    save_trainer(engine.deepspeed, path, {"step": 2})
    row = STEPS[0][0]
    ids, temperatures = torch.tensor(row.input_ids), torch.tensor(row.temperatures)
    with torch.no_grad():
        logprobs, _ = engine.forward(ids, torch.arange(len(row)), temperatures, (len(row),))
    found = {"tied": tied, "stage": stage, "model": model, "path": path, "weights": clones(engine)}
    found |= {"logprobs": logprobs.clone(), "state": CheckpointReader(path).tensors}
    engine.close()
    mark_complete(path.parent, ["trainer"])
    return found


def test_only_what_was_trained_is_saved(saved: dict[str, Any]) -> None:
    whole = {name for name in saved["state"] if ".lora_" not in name and name.startswith("model.")}
    assert whole == {f"model.{name}" for name in BOTH[saved["tied"]]}
    assert {f"optim.exp_avg.{name}" for name in BOTH[saved["tied"]]} <= saved["state"].keys()


def test_resumed_bitwise_and_other_modules_refused(saved: dict[str, Any], world: World) -> None:
    engine = engine_of(saved["model"], world, saved["stage"], lora(saved["tied"]))
    assert load_trainer(engine.deepspeed, saved["path"], training.CkptConfig()) == {"step": 2}
    assert all(torch.equal(tensor, saved["weights"][name]) for name, tensor in engine.full_tensors())
    engine.close()
    engine = engine_of(saved["model"], world, saved["stage"], lora(saved["tied"], modules_to_save=[]))
    with pytest.raises(ValueError, match=r"and all of lm_head.*lora\.modules_to_save"):
        load_trainer(engine.deepspeed, saved["path"], training.CkptConfig())
    engine.close()


def test_a_merged_export_holds_them(saved: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    out = saved["path"].parents[1] / "merged"
    export(saved["path"].parent, out, torch.float32, 4000, saved["model"])
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    found = dict(loaded.named_parameters())
    assert found.keys() == saved["weights"].keys()
    for name in BOTH[saved["tied"]]:
        assert torch.equal(found[name], saved["weights"][name]), name
    assert all((found[name] - saved["weights"][name]).abs().max() < 1e-6 for name in found)


def test_peft_reads_them_from_an_adapter_export(saved: dict[str, Any]) -> None:
    """Also tied ones, which PEFT keeps twice: both copies are in the file."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = saved["path"].parents[1] / "alone"
    export(saved["path"].parent, out, torch.float32, 4000, saved["model"], merge=False)
    config = json.loads((out / "adapter_config.json").read_text())
    second = "model.embed_tokens" if saved["tied"] else "model.norm"
    assert config["modules_to_save"] == ["lm_head", second] and "prl_tied" not in config
    assert f"base_model.model.{second}.weight" in load_file(out / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(saved["model"], dtype=torch.float32)
    with torch.no_grad():
        found = sequence_logprobs(PeftModel.from_pretrained(base, out), STEPS[0][0])
    torch.testing.assert_close(found[1:], saved["logprobs"][1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("stage", [1, 3])
def test_their_masters_hold_what_the_files_hold(stage: int, untied_dir: Path, world: World) -> None:
    """In bfloat16 too, where the frozen weights beside them are rounded."""
    from prl.checkpoint.zero import partitions

    engine = engine_of(untied_dir, world, stage, lora(False), dtype="bfloat16")
    stored = load_file(untied_dir / "model.safetensors")
    held = {n: f for part in partitions(engine.deepspeed) for n, f in part.fragments(part.flat).items()}
    for name in BOTH[False]:
        assert torch.equal(held[name].run, stored[name].flatten()), name
    frozen = dict(engine.full_tensors())["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(frozen, stored["model.layers.0.mlp.up_proj.weight"].bfloat16())
    engine.close()


@pytest.mark.parametrize(
    ("ending", "message"),
    [
        ("wte", "modules_to_save=wte: the model has none of it, but .*lm_head"),
        ("mlp", r"layers\.0\.mlp gets adapters, holds other modules"),
        ("1.mlp.down_proj", "down_proj gets adapters"),
        ("act_fn", "name single modules"),
    ],
)
def test_what_cannot_be_saved_so_is_refused(
    ending: str, message: str, untied_dir: Path, world: World
) -> None:
    with pytest.raises(ValueError, match=message):
        engine_of(untied_dir, world, 0, lora(False, modules_to_save=[ending]))


def test_endings_match_as_in_peft_and_stacked_experts_do_not(untied_dir: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied_dir)
    found = saved_modules(model, lora(False, modules_to_save=["norm"]))
    assert {name.rpartition(".")[2] for name in found} == {
        "norm",
        "q_norm",
        "k_norm",
        "input_layernorm",
        "post_attention_layernorm",
    }
    assert adapter_config(model) is None
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 4, "moe_intermediate_size": 8, "vocab_size": 20, "head_dim": 8}
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts, intermediate_size=8))
    assert saved_modules(moe, lora(False, modules_to_save=["mlp.gate"])) == ["model.layers.0.mlp.gate"]
    with pytest.raises(ValueError, match="stacked experts"):
        saved_modules(moe, lora(False, modules_to_save=["experts"]))
