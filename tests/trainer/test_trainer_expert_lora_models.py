"""Adapters of experts in each family of stacked ones: what is published computes what the trainer does."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_trainer_expert_lora import disturb
from transformers import AutoConfig, AutoModelForCausalLM

from prl.checkpoint.experts import STACKED
from prl.config.training import LoraConfig
from prl.trainer.expert_lora import expert_modules
from prl.trainer.lora import install_lora, is_low_rank
from prl.trainer.published import merged_weights

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
LATENT = {
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8},
    **{"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1},
    **{"first_k_dense_replace": 1, "routed_scaling_factor": 2.5},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 4},
    "qwen3_moe": {"num_experts": 4, "head_dim": 8},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": {**LATENT, "topk_method": "group_limited_greedy"},
    "deepseek_v3": LATENT,
    "glm4_moe": {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 8},
}


def policy_of(family: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config).eval()


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(24)[None], use_cache=False).logits


def test_every_family_is_here() -> None:
    assert FAMILIES.keys() == set(STACKED)


@pytest.mark.parametrize("family", STACKED)
def test_merged_weights_compute_what_adapters_do(family: str, tmp_path: Path) -> None:
    policy = policy_of(family)
    plain = logits_of(policy)
    install_lora(policy, LoraConfig(rank=3, alpha=6.0, targets=["experts"]), 0)
    assert torch.equal(logits_of(policy), plain), "adapters change nothing at first"
    stacks = [name for name, _ in policy.named_parameters() if is_low_rank(name)]
    assert len(stacks) == 6 * len(expert_modules(policy)) > 0
    disturb(policy)
    adapted = logits_of(policy)
    assert (adapted - plain).abs().max() > 1e-2
    tensors = {n: t.clone() for entry in merged_weights(policy) for n, t in entry.tensors().items()}
    tensors |= {n: b.clone() for n, b in policy.named_buffers() if n in policy.state_dict()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    policy.config.save_pretrained(tmp_path)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits_of(merged), adapted, rtol=0, atol=1e-5)


def test_experts_of_another_layout_are_told(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **SIZES, num_local_experts=4))
    with pytest.raises(ValueError, match=r"lora\.targets=\['experts'\]: the model has none of them"):
        install_lora(policy, LoraConfig(rank=2, targets=["experts"]), 0)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        install_lora(policy, LoraConfig(rank=2), 0)
    assert "the experts of mixtral get no adapters" in caplog.text
