"""Packed rows equal separate sequences, forward and gradient, whichever kernel attends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from trainer_lab import load_reference, make_sequences, pack, sequence_logprobs, without_a_compiler

from prl.config.training import ModelConfig, TrainerConfig
from prl.records import MicroBatch
from prl.trainer.attention import PACKED, packed_attention
from prl.trainer.model import attention_name, load_policy

CPU = torch.device("cpu")
SEQUENCES = make_sequences(5, ["rl"] * 4)


def policy(directory: Path, attn: str = "auto", **trainer: object) -> torch.nn.Module:
    settings = TrainerConfig(attn=attn, lm_head_chunk=7, **trainer)
    return load_policy(ModelConfig(name="lab", path=str(directory)), settings, CPU, seed=0)


def forward(model: torch.nn.Module, row: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
    return model(
        torch.tensor(row.input_ids),
        torch.tensor(row.position_ids),
        torch.tensor(row.temperatures),
        tuple(row.sequence_lengths),
    )


def inner(row: MicroBatch) -> torch.Tensor:
    """True where a token has a predecessor in its own sequence."""
    return torch.tensor(row.position_ids) > 0


@pytest.mark.parametrize("attn", ["auto", "sdpa"])
def test_packed_equals_separate_forward_and_gradient(model_dir: Path, attn: str) -> None:
    row = pack(SEQUENCES)
    model = policy(model_dir, attn)
    logprobs, _ = forward(model, row)
    slope = torch.linspace(-1, 1, len(row)) * inner(row)
    (logprobs * slope).sum().backward()

    reference = load_reference(model_dir)
    expected = torch.cat([sequence_logprobs(reference, s) for s in SEQUENCES])
    (expected * slope).sum().backward()
    assert (logprobs - expected)[inner(row)].abs().max() < 1e-5
    for name, parameter in reference.named_parameters():
        gradient = model.get_parameter(name).grad
        assert (gradient - parameter.grad).abs().max() < 1e-5 * max(1, float(parameter.grad.abs().max())), (
            name
        )


@pytest.mark.parametrize("attn", ["auto", "sdpa"])
def test_neighbours_cannot_be_seen(model_dir: Path, attn: str) -> None:
    """Other tokens in the first sequence change nothing in the others, to the last bit."""
    changed = make_sequences(5, ["rl"] * 4)
    changed[0].input_ids = [(token + 1) % 40 for token in changed[0].input_ids]
    model = policy(model_dir, attn)
    first = len(SEQUENCES[0])
    before, after = (forward(model, pack(s))[0].detach() for s in (SEQUENCES, changed))
    assert not torch.equal(before[1:first], after[1:first])
    assert torch.equal(before[first + 1 :], after[first + 1 :])


def test_sdpa_takes_the_borders_from_the_positions(model_dir: Path) -> None:
    """The check above must be able to fail: positions that run on join the sequences."""
    row = pack(SEQUENCES)
    model = policy(model_dir, "sdpa")
    apart = forward(model, row)[0]
    row.position_ids = list(range(len(row)))
    joined = forward(model, row)[0]
    assert (apart - joined).abs().max() > 0.1


def test_padding_is_harmless(model_dir: Path) -> None:
    padding = make_sequences(9, ["none"])[0]
    model = policy(model_dir)
    alone, padded = forward(model, pack(SEQUENCES))[0], forward(model, pack([*SEQUENCES, padding]))[0]
    torch.testing.assert_close(padded[: len(alone)], alone)


def gradients(model: torch.nn.Module, *rows: MicroBatch) -> list[torch.Tensor]:
    for row in rows:
        forward(model, row)[0].sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_gives_the_same_gradient(model_dir: Path, recompute: str, offload: bool) -> None:
    expected = gradients(policy(model_dir), pack(SEQUENCES))
    model = policy(model_dir, recompute=recompute, offload_activations=offload)
    calls = []
    for layer in model.model.layers:
        layer.mlp.gate_proj.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    found = gradients(model, pack(SEQUENCES))
    assert len(calls) == 4, "each of the two layers computes its feed-forward part again"
    for plain, recomputed in zip(expected, found, strict=True):
        torch.testing.assert_close(plain, recomputed)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compiled_layers_give_the_same_gradient_and_one_document_is_one_graph(
    model_dir: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without code generation: what is compiled is what counts. A row of one document has no break."""
    from torch._dynamo.utils import counters

    for name, stand_in in without_a_compiler().items():
        monkeypatch.setattr(f"prl.trainer.model.{name}", stand_in)
    rows = [pack(SEQUENCES[:1]), pack(SEQUENCES[:3])]
    model = policy(model_dir, compile=True, recompute=recompute)
    forward(model, rows[0])[0].sum().backward()
    assert counters["stats"]["unique_graphs"] >= 2 and not counters["graph_break"]
    expected = gradients(policy(model_dir), *rows)
    for plain, compiled in zip(expected, gradients(model, rows[1]), strict=True):
        torch.testing.assert_close(plain, compiled, rtol=1e-4, atol=1e-5)


def test_the_first_slot_is_a_uniform_guess_and_index_i_speaks_of_token_i(model_dir: Path) -> None:
    row = pack(SEQUENCES[:1])
    logprobs, entropy = forward(policy(model_dir), row)
    assert logprobs[0].item() == pytest.approx(-float(torch.tensor(40.0).log()))
    assert entropy[0].item() == pytest.approx(float(torch.tensor(40.0).log()))
    expected = sequence_logprobs(load_reference(model_dir), SEQUENCES[0])
    torch.testing.assert_close(logprobs[1:].double(), expected[1:], rtol=1e-4, atol=1e-5)


def test_the_kernel_refuses_what_it_cannot_do() -> None:
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ValueError, match="attn=sdpa"):
        packed_attention(None, query, query, query, None, sequence_lengths=(4,), sliding_window=2)
    with pytest.raises(AssertionError):
        packed_attention(None, query, query, query, None, sequence_lengths=(3,))


def test_kernel_names(model_dir: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_dir)
    assert attention_name("auto", config, CPU) == PACKED
    assert attention_name("flex", config, torch.device("cuda")) == "flex_attention"
    with pytest.raises(ValueError, match="no backward of it on CPUs"):
        attention_name("flex", config, CPU)
    assert attention_name("flash", config, torch.device("cuda")) == PACKED
    with pytest.raises(ValueError, match="needs a GPU"):
        attention_name("flash", config, CPU)
    config.layer_types = ["sliding_attention", "full_attention"]
    assert attention_name("auto", config, CPU) == "sdpa"
    with pytest.raises(ValueError, match="sliding"):
        attention_name("flash", config, torch.device("cuda"))
