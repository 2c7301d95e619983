"""Experts come apart on export: names of files, bitwise equal, one at a time where a shard is small."""

from __future__ import annotations

import os
import stat

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prl.checkpoint.experts import is_stacked, split_experts
from prl.checkpoint.export import export
from prl.checkpoint.marker import mark_complete, step_dir

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def moe_model():
    torch.manual_seed(1)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=31,
            hidden_size=20,
            moe_intermediate_size=9,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=10,
            num_experts=3,
            num_experts_per_tok=2,
        )
    )


@pytest.mark.parametrize("shard_bytes", [10**9, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exported_mixture_is_bit_exact(tmp_path, dtype, shard_bytes):
    model = moe_model()
    step = step_dir(tmp_path, 1)
    state = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    dcp.save(state, checkpoint_id=step / "trainer", no_dist=True)
    mark_complete(step, ["trainer"])
    model.save_pretrained(tmp_path / "source")
    export(step, tmp_path / "out", dtype, shard_bytes, tmp_path / "source")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 10) == (shard_bytes == 700)
    names = {name for file in files for name in load_file(file)}
    assert names == set(load_file(tmp_path / "source" / "model.safetensors"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype).state_dict()
    expected = model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name].to(dtype)) for name in expected)


def test_files_have_the_permissions_of_any_other(tmp_path):
    """safetensors makes files that only their owner may read."""
    model = moe_model()
    step = step_dir(tmp_path, 1)
    dcp.save({"model.a": torch.ones(3)}, checkpoint_id=step / "trainer", no_dist=True)
    model.config.save_pretrained(tmp_path / "source")
    before = os.umask(0o027)
    try:
        export(step, tmp_path / "out", torch.float32, 10**9, tmp_path / "source")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out" / "model.safetensors").stat().st_mode) == 0o640


def test_other_models_and_other_names_stay_whole():
    tensor = torch.arange(24.0).view(2, 4, 3)
    assert not is_stacked({"model_type": "mixtral"}, "model.layers.0.mlp.experts.gate_up_proj")
    assert not is_stacked({"model_type": "qwen3_moe"}, "model.layers.0.mlp.gate.weight")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert split_experts({"model_type": "qwen3"}, name, tensor).keys() == {name}
    found = split_experts({"model_type": "qwen3_moe"}, name, tensor)
    assert torch.equal(found["model.layers.0.mlp.experts.1.up_proj.weight"], tensor[1, 2:])
    assert torch.equal(found["model.layers.0.mlp.experts.0.gate_proj.weight"], tensor[0, :2])
    down = split_experts({"model_type": "qwen3_moe"}, name.replace("gate_up", "down"), tensor)
    assert torch.equal(down["model.layers.0.mlp.experts.1.down_proj.weight"], tensor[1])
