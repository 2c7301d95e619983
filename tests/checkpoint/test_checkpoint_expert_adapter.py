"""Adapters of stacked experts in checkpoints: resumed at any stage, exported merged or as PEFT reads them."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_ranks import spawn, tiny_moe
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prl.checkpoint.experts import adapter_names
from prl.checkpoint.export import export
from prl.checkpoint.marker import mark_complete
from prl.checkpoint.reader import CheckpointReader

LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "experts"]}
ALONE = {"rank": 2, "alpha": 6.0, "targets": ["experts"]}
COMMON = {"moe": True, "lora": LORA}
SAME_LAYOUT = {
    "zero-0": {**COMMON, "zero": {"stage": 0}},
    "zero-1": {**COMMON, "zero": {"stage": 1}, "lora": ALONE},
    "zero-3": {**COMMON, "zero": {"stage": 3, "param_persistence_threshold": 0}},
    "bfloat16-3": {**COMMON, "zero": {"stage": 3, "param_persistence_threshold": 0}, "dtype": "bfloat16"},
}
OTHER_LAYOUT = {
    "zero-0 to 3": ("zero-0", SAME_LAYOUT["zero-3"]),
    "zero-3 to 1": ("zero-3", {**COMMON, "zero": {"stage": 1}}),
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Resumed in the same layout on two ranks, at other stages on two and on one; and what was published."""
    root = tmp_path_factory.mktemp("expert_adapters")

    def path(name: str) -> str:
        return str(root / name / "step_2" / "trainer")

    phases = []
    for name, case in SAME_LAYOUT.items():
        phases += [{"do": do, "path": path(name), **case} for do in ("save", "resume")]
    other = [{"do": "resume", "path": path(name), **case} for name, case in OTHER_LAYOUT.values()]
    without = {**SAME_LAYOUT["zero-0"], "lora": {**LORA, "targets": ["q_proj"]}}
    phases += [*other, {"do": "refused", "path": path("zero-0"), **without}]
    phases += [{"do": "publish", "path": path("published"), **SAME_LAYOUT["zero-3"]}]
    found = spawn(2, phases, root)
    count = 2 * len(SAME_LAYOUT)
    resumed = dict(zip(SAME_LAYOUT, found[1:count:2], strict=True))
    resumed |= {f"{name}, two": entry for name, entry in zip(OTHER_LAYOUT, found[count:], strict=False)}
    alone = spawn(1, other, root / "one")
    resumed |= {f"{name}, one": entry for name, entry in zip(OTHER_LAYOUT, alone, strict=True)}
    tiny_moe().save_pretrained(root / "base")
    mark_complete(root / "published" / "step_2", ["trainer"])
    return {"root": root, "resumed": resumed, "refused": found[-2]}


@pytest.mark.parametrize("name", SAME_LAYOUT)
def test_the_same_layout_continues_bitwise(results, name):
    found = results["resumed"][name]
    assert found["different"] == [] and found["same_losses"], found["error"]


@pytest.mark.parametrize("name", [f"{name}, {ranks}" for name in OTHER_LAYOUT for ranks in ("one", "two")])
def test_another_layout_has_the_same_weights(results, name):
    found = results["resumed"][name]
    assert found["different"] == [] and found["error"] < 5e-6


def test_only_adapters_are_saved_as_stacks(results):
    tensors = CheckpointReader(results["root"] / "zero-1" / "step_2" / "trainer").tensors
    model = {name: tuple(entry.size) for name, entry in tensors.items() if name.startswith("model.")}
    assert len(model) == 2 * 6
    assert model["model.model.layers.1.mlp.experts.lora_A_up_proj"] == (3, 2, 24)
    assert model["model.model.layers.1.mlp.experts.lora_B_down_proj"] == (3, 24, 2)
    assert {str(entry.properties.dtype) for entry in tensors.values()} == {"torch.float32"}


def test_a_checkpoint_is_refused_without_its_targets(results):
    assert "of rank 2, alpha 6 on experts,q_proj" in results["refused"]
    assert "lora.targets" in results["refused"]


@pytest.mark.parametrize("shard_bytes", [10**9, 3000])
def test_a_merged_export_equals_what_engines_were_sent(results, tmp_path, shard_bytes):
    step = results["root"] / "published" / "step_2"
    base = results["root"] / "base"
    exported = export(step, tmp_path / "out", torch.float32, shard_bytes, base)
    assert (exported.num_files > 3) == (shard_bytes == 3000)
    files = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        files |= load_file(file)
    published, before = torch.load(step / "trainer.weights"), load_file(base / "model.safetensors")
    assert files.keys() == published.keys() == before.keys()
    assert all((files[name] - published[name]).abs().max() < 1e-6 for name in files)
    changed = {name for name in files if not torch.equal(files[name], before[name])}
    assert changed == {name for name in files if ".experts." in name or "q_proj" in name}


def test_an_adapter_export_is_what_peft_reads(results, tmp_path):
    """PEFT puts the matrices of single experts together for the stacked parameters by itself."""
    from peft import PeftModel

    step = results["root"] / "published" / "step_2"
    base, out = results["root"] / "base", tmp_path / "alone"
    export(step, out, torch.float32, 4000, base, merge=False)
    tensors = load_file(out / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.1.mlp.experts.2.gate_proj.lora_A.weight"].shape == (2, 24)
    assert tensors["base_model.model.model.layers.1.mlp.experts.2.gate_proj.lora_B.weight"].shape == (16, 2)
    assert len(tensors) == 2 * 2 * (1 + 3 * 3)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "gate_proj", "q_proj", "up_proj"]
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out)
    merged = dict(model.merge_and_unload().named_parameters())
    whole = tmp_path / "whole"
    export(step, whole, torch.float32, 10**9, base)
    expected = dict(AutoModelForCausalLM.from_pretrained(whole).named_parameters())
    assert merged.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (merged[name] - tensor).abs().max() < 1e-6, name


def test_names_of_single_matrices():
    path = "model.layers.0.mlp.experts"
    found = adapter_names(f"{path}.lora_B_down_proj", (2, 24, 4))
    assert found == [f"{path}.{n}.down_proj.lora_B.weight" for n in (0, 1)]
    assert adapter_names(f"{path}.down_proj", (2, 24, 16)) is None
    assert adapter_names("model.layers.0.self_attn.q_proj.lora_A.default.weight", (2, 24)) is None
