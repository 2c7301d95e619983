"""Loading: from files, at random, in part; what the trainer cannot serve exactly is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_lab import make_model

from prl.config.training import ModelConfig, TrainerConfig
from prl.trainer.model import compute_dtype, load_policy

CPU = torch.device("cpu")


def load(directory: Path, **fields: object) -> torch.nn.Module:
    return load_policy(ModelConfig(name="lab", path=str(directory), **fields), TrainerConfig(), CPU, seed=3)


def test_weights_come_from_the_files(model_dir: Path) -> None:
    model = load(model_dir)
    stored = load_file(model_dir / "model.safetensors")
    assert {name for name, _ in model.named_parameters()} == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(model.get_parameter(name), tensor), name
    assert model.training and model.config.use_cache is False


def test_random_initialisation_is_seeded_and_needs_only_the_config(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((model_dir / "config.json").read_text())
    first, second = (load(tmp_path, random_init=True) for _ in range(2))
    stored = load_file(model_dir / "model.safetensors")
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
    assert not torch.equal(first.model.embed_tokens.weight, stored["model.embed_tokens.weight"])


def test_num_layers_keeps_the_first(model_dir: Path) -> None:
    model = load(model_dir, num_layers=1)
    stored = load_file(model_dir / "model.safetensors")
    assert len(model.model.layers) == 1
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.get_parameter(name), stored[name])
    with pytest.raises(ValueError, match="only 2 layers"):
        load(model_dir, num_layers=3)


def test_a_model_that_changes_its_logits_is_refused(tmp_path: Path, model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        load(tmp_path, random_init=True)


def test_compute_type() -> None:
    gpu = torch.device("cuda")
    assert compute_dtype(TrainerConfig(), CPU) == torch.float32
    assert compute_dtype(TrainerConfig(), gpu) == torch.bfloat16
    assert compute_dtype(TrainerConfig(dtype="float32"), gpu) == torch.float32
    assert compute_dtype(TrainerConfig(dtype="bfloat16"), CPU) == torch.bfloat16


def test_untied_head_is_a_parameter_of_its_own(tmp_path: Path) -> None:
    model = load(make_model(tmp_path, tied=False))
    assert "lm_head.weight" in dict(model.named_parameters())
