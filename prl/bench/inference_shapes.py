"""Model shapes that are measured with random weights: a directory with config.json is all they need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.memory import read_sizes

COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
}


def _shape(vocab: int, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int) -> dict:
    return {
        **COMMON,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": ffn,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "0.3m": _shape(512, 96, 2, 4, 2, 24, 256),
    "1m": _shape(1024, 128, 4, 4, 2, 32, 384),
    "6m": _shape(4096, 256, 6, 4, 2, 64, 768),
    "smollm2-135m": {
        **_shape(49_152, 576, 30, 9, 3, 64, 1536),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
    },
    "qwen3-0.6b": {
        **_shape(151_936, 1024, 28, 16, 8, 128, 3072),
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 40_960,
    },
}
"""Name -> config.json. SmolLM2-135M and Qwen3-0.6B have their published sizes."""


def kv_bytes(directory: Path, batch: int, length: int, width: int) -> int:
    """Bytes of the keys and values of `batch` sequences of `length` tokens, elements of `width` bytes, and a
    tenth more: engines deal them out in blocks.

    Raises ValueError for a model whose config.json does not name its sizes.
    """
    sizes = read_sizes(directory)
    if sizes is None:
        raise ValueError(f"{directory / 'config.json'} does not name the model's sizes in the usual way")
    return batch * (length + 16) * sizes.kv_bytes(width) * 11 // 10


def write_shape(name: str, directory: Path) -> Path:
    """The model directory of a shape, or the directory that `name` is. Raises ValueError for neither."""
    if name not in SHAPES:
        if (Path(name).expanduser() / "config.json").is_file():
            return Path(name).expanduser()
        raise ValueError(f"--model {name}: neither a model directory nor one of {', '.join(SHAPES)}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    return directory
