"""Mixtures of experts: models hold all experts of a layer in one tensor, files name them one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

STACKED = ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe")
"""Model types whose files hold `experts.<n>.{gate,up,down}_proj.weight` for the stacked tensors."""

_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")


def is_stacked(config: Any, name: str) -> bool:
    """Whether parameter `name` holds all experts of a layer. `config`: Hugging Face's, object or dict."""
    kind = config["model_type"] if isinstance(config, Mapping) else config.model_type
    return kind in STACKED and _STACK.fullmatch(name) is not None


def split_experts(config: Any, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """`tensor` under the names of files, as views.

    [experts, 2 ffn, h] -> gate and up [ffn, h], [experts, h, ffn] -> down [h, ffn]; others stay as they are.
    """
    if not is_stacked(config, name):
        return {name: tensor}
    match = _STACK.fullmatch(name)
    assert match is not None
    experts, kind = match.groups()
    found = {}
    for index, expert in enumerate(tensor):
        if kind == "down_proj":
            found[f"{experts}.{index}.down_proj.weight"] = expert
        else:
            gate, up = expert.chunk(2)
            found |= {f"{experts}.{index}.gate_proj.weight": gate, f"{experts}.{index}.up_proj.weight": up}
    return found
