"""Cost of a row from a model's config."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from prl.orchestrator.cost import RowCost, cost_from_config, cost_of_model

DENSE = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 3, "intermediate_size": 16, "vocab_size": 100,
}  # fmt: skip


def test_dense_model_by_hand() -> None:
    # per layer: q 8x12, k and v 8x6, o 12x8 -> 2 * (96 + 48 + 48 + 96); ffn 6 * 8 * 16; head 2 * 8 * 100
    alpha = 2 * (2 * (96 + 48 + 48 + 96) + 6 * 8 * 16) + 2 * 8 * 100
    assert cost_from_config(DENSE) == RowCost(alpha, 2 * 2 * 4 * 3)


def test_head_width_and_kv_heads_have_defaults() -> None:
    config = {name: value for name, value in DENSE.items() if name not in ("head_dim", "num_key_value_heads")}
    alpha = 2 * (2 * 4 * 8 * 8 + 6 * 8 * 16) + 2 * 8 * 100
    assert cost_from_config(config) == RowCost(alpha, 2 * 2 * 4 * 2)


def test_experts_count_those_a_token_visits() -> None:
    config = {**DENSE, "moe_intermediate_size": 4, "num_experts_per_tok": 3, "num_experts": 64}
    dense, sparse = cost_from_config(DENSE), cost_from_config(config)
    assert dense.alpha - sparse.alpha == 2 * 6 * 8 * (16 - 12)
    shared = cost_from_config({**config, "n_shared_experts": 2, "first_k_dense_replace": 1})
    assert shared.alpha - sparse.alpha == 6 * 8 * (16 + 20 - 24)


def test_latent_attention_uses_its_own_widths() -> None:
    latent = {
        **DENSE, "kv_lora_rank": 5, "q_lora_rank": None, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2,
        "v_head_dim": 7,
    }  # fmt: skip
    attention = 2 * (8 * 4 * 8 + 8 * (5 + 2) + 5 * 4 * (6 + 7) + 4 * 7 * 8)
    assert cost_from_config(latent) == RowCost(2 * (attention + 6 * 8 * 16) + 1600, 2 * 4 * (8 + 7))


def test_a_row_costs_tokens_and_squares() -> None:
    assert RowCost(2.0, 0.5).of([3, 1]) == 2 * 4 + 0.5 * 10
    assert RowCost().of([3, 1]) == 4


def test_nested_text_config_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": DENSE}))
    assert cost_of_model(tmp_path) == cost_from_config(DENSE)


@pytest.mark.parametrize("text", [None, "{", '{"hidden_size": 8}'])
def test_an_unreadable_config_means_tokens_and_a_warning(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with caplog.at_level(logging.WARNING):
        assert cost_of_model(tmp_path) == RowCost(1.0, 0.0)
    assert "balanced by tokens alone" in caplog.text
