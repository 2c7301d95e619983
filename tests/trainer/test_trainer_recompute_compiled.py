"""Recomputation inside compiled layers: all layers share their graphs, and gradients stay the plain ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from transformers import Qwen3Config, Qwen3ForCausalLM

from prl.config.training import TrainerConfig
from prl.trainer.recompute import decoder_layers, prepare_layers

LAYERS = 12
"""More than the eight graphs after which dynamo leaves a function uncompiled."""


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def make_policy() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": LAYERS, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32}
    return Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, attn_implementation="sdpa")).train()


def gradients(policy: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    hidden = policy.model(input_ids=torch.arange(10)[None], use_cache=False).last_hidden_state
    hidden.square().sum().backward()
    return hidden.detach(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("recompute", "offload"), [("none", False), ("selective", False), ("full", False), ("full", True)]
)
def test_layers_compile_once_and_give_the_plain_gradients(recompute: str, offload: bool) -> None:
    expected_hidden, expected = gradients(make_policy())
    policy = make_policy()
    backend = CompileCounterWithBackend("aot_eager")
    settings = TrainerConfig(recompute=recompute, offload_activations=offload, compile=True)
    prepare_layers(policy, settings, backend)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        hidden, found = gradients(policy)
    assert 1 <= backend.frame_count <= 3, "one graph for all layers, but for a break inside"
    assert not counters["graph_break"]
    torch.testing.assert_close(hidden, expected_hidden)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("offload", [False, True])
def test_only_the_feed_forward_part_is_computed_again(offload: bool) -> None:
    policy = make_policy()
    calls = {"mlp": 0, "self_attn": 0}
    prepare_layers(policy, TrainerConfig(recompute="selective", offload_activations=offload))

    def count(name: str) -> Any:
        def hook(*_: Any) -> None:
            calls[name] += 1

        return hook

    for layer in decoder_layers(policy):
        layer.mlp.gate_proj.register_forward_hook(count("mlp"))
        layer.self_attn.q_proj.register_forward_hook(count("self_attn"))
    _, found = gradients(policy)
    assert calls == {"mlp": 2 * LAYERS, "self_attn": LAYERS}
    _, expected = gradients(make_policy())
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


def test_parts_keep_the_names_of_their_classes() -> None:
    """Others find them by it, and by what they are."""
    policy = make_policy()
    kinds = [type(layer.mlp) for layer in decoder_layers(policy)]
    prepare_layers(policy, TrainerConfig(recompute="selective"))
    changed = {type(layer.mlp) for layer in decoder_layers(policy)}
    assert len(changed) == 1 and changed.isdisjoint(kinds)
    assert changed.pop().__name__ == kinds[0].__name__
    assert all(isinstance(layer.mlp, kinds[0]) for layer in decoder_layers(policy))
