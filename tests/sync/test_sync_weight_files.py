"""Reading Hugging Face weight directories: single file, shards, what is missing."""

import json

import pytest
import torch
from safetensors.torch import save_file

from prl.sync.weight_files import TensorSpec, WeightFiles


def test_a_single_file(tmp_path):
    save_file(
        {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "model.safetensors"
    )
    files = WeightFiles(tmp_path)
    assert files.specs() == {
        "a": TensorSpec((2, 3), torch.float32),
        "b": TensorSpec((4,), torch.bfloat16),
    }
    assert torch.equal(dict(files.tensors())["a"], torch.ones(2, 3))


def test_dtypes_beyond_floats_keep_their_file_name(tmp_path):
    save_file({"a": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    assert WeightFiles(tmp_path).specs() == {"a": TensorSpec((2,), "I8")}


def test_the_index_goes_before_a_single_file(tmp_path):
    save_file({"old": torch.ones(1)}, tmp_path / "model.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert set(WeightFiles(tmp_path).specs()) == {"a", "b"}
    assert {name for name, _ in WeightFiles(tmp_path).tensors()} == {"a", "b"}


def test_a_missing_shard_is_named(tmp_path):
    index = {"weight_map": {"a": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"missing: one\.safetensors"):
        WeightFiles(tmp_path)


def test_a_directory_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        WeightFiles(tmp_path)
