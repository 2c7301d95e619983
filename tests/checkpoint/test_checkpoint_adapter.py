"""Adapters in checkpoints: saved alone, resumed bitwise, exported merged or as PEFT reads them."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoint_ranks import spawn, tiny_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from prl.checkpoint.export import export
from prl.checkpoint.marker import mark_complete
from prl.checkpoint.reader import CheckpointReader

LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "up_proj"]}
CASES = {
    "lora-1": {"zero": {"stage": 1}, "lora": LORA},
    "lora-3": {"zero": {"stage": 3, "param_persistence_threshold": 0}, "lora": LORA, "dtype": "bfloat16"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    phases = []
    for name, case in CASES.items():
        path = str(root / name / "step_2" / "trainer")
        phases += [{"do": "publish", **case, "path": path}]
        phases += [{"do": "save", **case, "path": path}, {"do": "resume", **case, "path": path}]
    other = {**CASES["lora-1"], "path": str(root / "lora-1" / "step_2" / "trainer")}
    phases += [{"do": "refused", **other, "lora": {**LORA, "alpha": 7.0}}]
    phases += [{"do": "refused", **other, "lora": {"rank": 0}}]
    found = spawn(2, phases, root)
    return {"root": root, "resumed": dict(zip(CASES, found[2:6:3], strict=True)), "refused": found[-2:]}


@pytest.mark.parametrize("name", list(CASES))
def test_resume_is_bitwise(results, name):
    resumed = results["resumed"][name]
    frozen = [entry for entry in resumed["different"] if "lora_" in entry or not entry.startswith("compute.")]
    assert frozen == [], "adapters, masters and moments come back to the last bit"
    assert resumed["extra"] == {"tokens": 128}


def test_only_adapters_are_saved(results):
    tensors = CheckpointReader(results["root"] / "lora-3" / "step_2" / "trainer").tensors
    assert tensors and all(".lora_A." in name or ".lora_B." in name for name in tensors)
    assert {name.split(".")[0] for name in tensors} == {"model", "optim"}
    assert {str(e.properties.dtype) for e in tensors.values()} == {"torch.float32"}


def test_other_adapters_are_refused(results):
    alpha, none = results["refused"]
    assert "saved with adapters of rank 2, alpha 6 on q_proj,up_proj" in alpha and "alpha 7" in alpha
    assert "the run has no adapters (lora=none)" in none


@pytest.fixture(scope="module")
def base(results):
    """The model that `publish` and `save` began with, on disk."""
    directory = results["root"] / "base"
    tiny_model(seed=0).save_pretrained(directory)
    return directory


def test_a_merged_export_equals_what_engines_were_sent(results, base):
    step = results["root"] / "lora-1" / "step_2"
    mark_complete(step, ["trainer"])
    out = results["root"] / "merged"
    assert export(step, out, torch.float32, 4000, base).num_files > 1
    loaded = dict(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters())
    published = torch.load(step / "trainer.weights")
    assert loaded.keys() == published.keys()
    assert all((loaded[name] - published[name]).abs().max() < 1e-6 for name in published)
    before = tiny_model(seed=0).state_dict()
    changed = {name for name in loaded if not torch.equal(loaded[name], before[name])}
    assert changed and all(name.split(".")[-2] in ("q_proj", "up_proj") for name in changed)


def test_an_adapter_export_is_what_peft_reads(results, base):
    from peft import PeftModel

    step = results["root"] / "lora-1" / "step_2"
    mark_complete(step, ["trainer"])
    out = results["root"] / "alone"
    export(step, out, torch.float32, 4000, base, merge=False)
    assert sorted(f.name for f in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    tensors = load_file(out / "adapter_model.safetensors")
    assert "base_model.model.model.layers.1.mlp.up_proj.lora_A.weight" in tensors
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), out).merge_and_unload()
    published = torch.load(step / "trainer.weights")
    for name, tensor in dict(model.named_parameters()).items():
        assert (tensor - published[name]).abs().max() < 1e-6, name


def test_an_export_onto_another_model_is_refused(results, base, tmp_path):
    step = results["root"] / "lora-1" / "step_2"
    mark_complete(step, ["trainer"])
    tiny_model(seed=0).config.save_pretrained(tmp_path / "bare")
    with pytest.raises(ValueError, match="the adapters need the weights that they were trained on"):
        export(step, tmp_path / "out", torch.float32, 4000, tmp_path / "bare")
    with pytest.raises(ValueError, match="which was adapted: it is another model"):
        export(step, tmp_path / "out", torch.float32, 4000, base, num_layers=1)
