"""What the embedded engine needs to know from a model directory's `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

QK_NORM = {
    "Qwen3ForCausalLM": True,
    "Qwen2ForCausalLM": False,
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
}
"""Architectures the dense decoder computes -> whether they normalise queries and keys per head."""

ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes and switches of a dense decoder-only transformer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: dict[str, Any]
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    output_bias: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_directory(cls, directory: Path, num_layers: int | None = None) -> DecoderConfig:
        """Read `config.json` (and `generation_config.json` for the end tokens, never for sampling).

        `num_layers` keeps only the first layers. Raises FileNotFoundError without a config and ValueError
        for a model that the dense decoder does not compute exactly.
        """
        raw = json.loads((directory / "config.json").read_text())
        architecture = _supported_architecture(directory, raw)
        bias = bool(raw.get("attention_bias", False))
        heads = raw["num_attention_heads"]
        return cls(
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=min(num_layers or raw["num_hidden_layers"], raw["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            max_positions=raw["max_position_embeddings"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope=_rope(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qk_norm=QK_NORM[architecture],
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            eos_token_ids=_eos_token_ids(directory, raw),
        )


def _supported_architecture(directory: Path, raw: dict[str, Any]) -> str:
    """The model's architecture. Raises ValueError with every reason why it cannot be served."""
    architecture = (raw.get("architectures") or ["?"])[0]
    reasons = []
    if architecture not in QK_NORM:
        reasons.append(f"architecture {architecture} (served: {', '.join(QK_NORM)})")
    if raw.get("hidden_act", "silu") != "silu":
        reasons.append(f"hidden_act={raw['hidden_act']}")
    if raw.get("mlp_bias"):
        reasons.append("mlp_bias=true")
    if _sliding_window(raw):
        reasons.append(f"sliding_window={raw['sliding_window']}")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        reasons.append(f"partial_rotary_factor={raw['partial_rotary_factor']}")
    if _rope(raw)["rope_type"] not in ROPE_TYPES:
        reasons.append(f"rope type {_rope(raw)['rope_type']} (served: {', '.join(ROPE_TYPES)})")
    if raw.get("quantization_config"):
        reasons.append("quantized weights")
    if reasons:
        raise ValueError(f"{directory}: the embedded engine cannot serve this model: {'; '.join(reasons)}")
    return architecture


def _sliding_window(raw: dict[str, Any]) -> bool:
    """True if some layer attends within a window only. Qwen configs name a window that they do not use."""
    if "layer_types" in raw:
        return "sliding_attention" in raw["layer_types"]
    return bool(raw.get("sliding_window")) and bool(raw.get("use_sliding_window", True))


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings with `rope_type` and `rope_theta`, wherever the config keeps them."""
    settings = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    settings["rope_type"] = settings.get("rope_type") or settings.get("type") or "default"
    settings.setdefault("rope_theta", raw.get("rope_theta", 10_000.0))
    return settings


def _eos_token_ids(directory: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    extra = json.loads(generation.read_text()) if generation.is_file() else {}
    found: set[int] = set()
    for ids in (raw.get("eos_token_id"), extra.get("eos_token_id")):
        found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return tuple(sorted(found))
