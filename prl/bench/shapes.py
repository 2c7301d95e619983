"""Model shapes by name: a config.json is all that a randomly initialised model needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.assets import bundled_model

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def _dense(hidden: int, layers: int, heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return _QWEN3 | sizes | {"intermediate_size": ffn} | more


SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_0_6b": _dense(1024, 28, 16, 3072),
    "qwen3_1_7b": _dense(2048, 28, 16, 6144),
    "qwen3_4b": _dense(2560, 36, 32, 9728),
    "qwen3_8b": _dense(4096, 36, 32, 12288, tie_word_embeddings=False),
    "qwen3_30b_a3b": _dense(2048, 48, 32, 6144)
    | _MOE
    | {"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "tiny_moe": _dense(96, 2, 4, 192)
    | _MOE
    | {"vocab_size": 264, "head_dim": 24, "num_key_value_heads": 2, "max_position_embeddings": 8192}
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "dtype": "float32"},
}
"""The published sizes of the Qwen3 family, and a mixture of experts as small as the bundled `tiny`."""


def shape_names() -> list[str]:
    return ["tiny", *SHAPES]


def write_shape(name: str, directory: Path) -> Path:
    """A model directory for `name`: a shape (config.json is written to `directory`), or a path as it is.

    Raises ValueError for a name that is neither.
    """
    if name == "tiny":
        return bundled_model("tiny")
    if name in SHAPES:
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
        return directory / name
    path = Path(name).expanduser().absolute()
    if not (path / "config.json").is_file():
        raise ValueError(f"model={name}: no such shape ({', '.join(shape_names())}) and no model directory")
    return path
