"""Mixtures of experts: models hold all experts of a layer in one tensor, files name them one by one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

STACKED = ("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe")
"""Model types whose files hold `experts.<n>.{gate,up,down}_proj.weight` for the stacked tensors."""

PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Stacked parameter -> the projections in it, one after the other along each expert's rows."""

PARTS = tuple(part for parts in PROJECTIONS.values() for part in parts)
"""All projections of an expert."""

_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_ADAPTERS = re.compile(r"(.*\.experts)\.lora_([AB])_(gate_proj|up_proj|down_proj)")


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
    parts = len(PROJECTIONS[name.rpartition(".")[2]])
    matrices = [matrix for expert in tensor for matrix in expert.chunk(parts)]
    return dict(zip(weight_names(name, len(tensor)), matrices, strict=True))


def weight_names(name: str, count: int) -> list[str]:
    """Names in files of the matrices in stacked parameter `name` of `count` experts, as they lie in it."""
    experts, _, kind = name.rpartition(".")
    return [f"{experts}.{index}.{part}.weight" for index in range(count) for part in PROJECTIONS[kind]]


def adapter_names(name: str, shape: Sequence[int]) -> list[str] | None:
    """Names in adapter files of the matrices in a stack of them, expert by expert; None for another name.

    `....experts.lora_A_up_proj` of `shape` [experts, rank, in] -> `....experts.<n>.up_proj.lora_A.weight`.
    """
    match = _ADAPTERS.fullmatch(name)
    if match is None:
        return None
    path, side, part = match.groups()
    return [f"{path}.{index}.{part}.lora_{side}.weight" for index in range(shape[0])]
