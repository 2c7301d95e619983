"""The bundled tiny model with heads of 32 instead of 24, which vLLM's CPU attention serves.

It computes the same function.
Each head gets zeros at the end of both rotary halves. Three things depend on the head's size and are undone:
the softmax scale and the heads' root mean square (in the weights of the head norms), and the rotary
frequencies (in theta). Gradients of the zeros are zero, so they stay.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prl.assets import bundled_model

OLD, NEW = 24, 32


def write_padded_tiny(directory: Path) -> Path:
    """The padded model as a Hugging Face directory."""
    source = bundled_model("tiny")
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    assert config["head_dim"] == OLD
    config["head_dim"] = NEW
    theta = config.get("rope_parameters", config)["rope_theta"] ** (NEW / OLD)
    config["rope_theta"] = theta
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = theta
    (directory / "config.json").write_text(json.dumps(config))
    weights = {name: _pad(name, tensor) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _pad(name: str, tensor: Tensor) -> Tensor:
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
        return _spread(tensor.unflatten(0, (-1, OLD)), 1).flatten(0, 1).contiguous()
    if name.endswith("o_proj.weight"):
        return _spread(tensor.unflatten(1, (-1, OLD)), 2).flatten(1, 2).contiguous()
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        # The mean square is over more entries; queries also make up for the smaller softmax scale.
        factor = (OLD / NEW) ** 0.5 * ((NEW / OLD) ** 0.5 if "q_norm" in name else 1.0)
        return (_spread(tensor, 0) * factor).contiguous()
    return tensor


def _spread(tensor: Tensor, dim: int) -> Tensor:
    """Zeros after each rotary half of the dimension."""
    halves = []
    for half in tensor.split(OLD // 2, dim=dim):
        shape = list(half.shape)
        shape[dim] = (NEW - OLD) // 2
        halves += [half, half.new_zeros(shape)]
    return torch.cat(halves, dim=dim)
