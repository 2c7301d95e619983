"""What a packed row costs to train: FLOPs of a forward pass, up to a factor, from the model's config.json."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowCost:
    """`alpha * sum(n) + beta * sum(n^2)` over the sequences of a row."""

    alpha: float = 1.0
    beta: float = 0.0

    def of(self, lengths: Sequence[int]) -> float:
        return self.alpha * sum(lengths) + self.beta * sum(n * n for n in lengths)


def cost_of_model(model_path: Path) -> RowCost:
    """Cost from `config.json` in `model_path`; tokens alone, with a warning, when that cannot be read."""
    try:
        config = json.loads((model_path / "config.json").read_text())
        return cost_from_config(config.get("text_config") or config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("rows are balanced by tokens alone: %s/config.json: %r", model_path, error)
        return RowCost()


def cost_from_config(config: Mapping[str, Any]) -> RowCost:
    """Matrix products of one token (alpha) and causal attention per squared length (beta).

    Raises KeyError when a size is missing.
    """
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    attention, score_width = _attention(config, hidden, heads)
    per_token = layers * attention + _feed_forward(config, hidden, layers) + 2 * hidden * config["vocab_size"]
    return RowCost(float(per_token), float(layers * heads * score_width))


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """(FLOPs of the projections of a token, query-key plus value width of a head)."""
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    width = config.get("head_dim") or hidden // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * hidden * width * (2 * heads + 2 * kv_heads), 2 * width


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    query_width = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    value_width, rank = config["v_head_dim"], config["kv_lora_rank"]
    query_rank = config.get("q_lora_rank")
    queries = heads * query_width
    query = query_rank * (hidden + queries) if query_rank else hidden * queries
    compressed = hidden * (rank + config["qk_rope_head_dim"])
    expanded = rank * heads * (config["qk_nope_head_dim"] + value_width)
    output = heads * value_width * hidden
    return 2 * (query + compressed + expanded + output), query_width + value_width


def _feed_forward(config: Mapping[str, Any], hidden: int, layers: int) -> int:
    """FLOPs of a token in the feed-forward parts of all layers; of experts, those that it visits."""
    width = config.get("moe_intermediate_size")
    if not width:
        return layers * 6 * hidden * config["intermediate_size"]
    dense = min(layers, config.get("first_k_dense_replace") or 0)
    shared = config.get("shared_expert_intermediate_size") or width * (config.get("n_shared_experts") or 0)
    visited = config["num_experts_per_tok"] * width + shared
    return 6 * hidden * (dense * config.get("intermediate_size", 0) + (layers - dense) * visited)
