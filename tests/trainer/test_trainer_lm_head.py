"""The chunked head equals full logits in float64, at every temperature and chunk size."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from prl.trainer import lm_head
from prl.trainer.lm_head import install_chunked_head, next_token_logprobs, shift_right

N, H, V = 23, 6, 31


def make_inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "hidden": torch.randn(N, H, generator=generator).to(dtype).requires_grad_(),
        "weight": torch.randn(V, H, generator=generator).to(dtype).requires_grad_(),
        "labels": torch.randint(0, V, (N,), generator=generator),
        "temperatures": torch.tensor([0.7, 1.0, 1.3])[torch.randint(0, 3, (N,), generator=generator)],
    }


def plain(hidden: Any, weight: Any, labels: Any, temperatures: Any) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (hidden @ weight.T) / temperatures[:, None].to(hidden.dtype)
    log_probabilities = F.log_softmax(logits, -1)
    entropy = -(log_probabilities.exp() * log_probabilities).sum(-1)
    return log_probabilities.gather(1, labels[:, None])[:, 0], entropy


@pytest.mark.parametrize("block", [5, 31, 8192])
@pytest.mark.parametrize("chunk", [0, 1, 4, 7, 23, 100])
def test_values_and_gradients_equal_full_logits(
    chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm_head, "VOCAB_BLOCK", block)
    mine, theirs = make_inputs(), make_inputs()
    logprobs, entropy = next_token_logprobs(**mine, chunk=chunk)
    expected, expected_entropy = plain(**theirs)
    torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=1e-6)  # temperatures are float32
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-6, atol=1e-6)
    slope = torch.linspace(-1, 1, N, dtype=torch.float64)
    (logprobs * slope).sum().backward()
    (expected * slope).sum().backward()
    for name in ("hidden", "weight"):
        torch.testing.assert_close(mine[name].grad, theirs[name].grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_float32_is_equal_to_rounding(temperature: float) -> None:
    mine, theirs = make_inputs(torch.float32), make_inputs()
    for inputs in (mine, theirs):
        inputs["temperatures"] = torch.full((N,), temperature)
    logprobs, entropy = next_token_logprobs(**mine, chunk=4)
    expected, expected_entropy = plain(**theirs)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert (logprobs - expected).abs().max() < 2e-6
    assert (entropy - expected_entropy).abs().max() < 2e-6


def test_bfloat16_keeps_float32_sums() -> None:
    inputs = make_inputs(torch.bfloat16)
    logprobs, _ = next_token_logprobs(**inputs, chunk=4)
    exact = plain(
        inputs["hidden"].float(), inputs["weight"].float(), inputs["labels"], inputs["temperatures"]
    )
    assert logprobs.dtype == torch.float32
    assert (logprobs - exact[0]).abs().max() < 0.05
    logprobs.sum().backward()
    assert inputs["weight"].grad.dtype == torch.bfloat16


def test_entropy_has_no_gradient() -> None:
    _, entropy = next_token_logprobs(**make_inputs(), chunk=4)
    assert not entropy.requires_grad


def test_entropy_survives_a_large_common_offset() -> None:
    """logsumexp(z) - E[z] would lose all digits at z of 1e6."""
    small = torch.arange(V, dtype=torch.float32)[:, None]
    ones, labels = torch.ones(N, 1), torch.zeros(N, dtype=torch.int64)
    _, entropy = next_token_logprobs(ones, small + 1e6, labels, torch.ones(N), chunk=4)
    _, exact = plain(ones.double(), small.double(), labels, torch.ones(N))
    torch.testing.assert_close(entropy.double(), exact, rtol=1e-5, atol=1e-6)


def test_large_logits_do_not_overflow() -> None:
    inputs = make_inputs(torch.float32)
    inputs["hidden"] = (inputs["hidden"].detach() * 1e4).requires_grad_()
    logprobs, entropy = next_token_logprobs(**inputs, chunk=4)
    logprobs.sum().backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all()
    assert torch.isfinite(inputs["hidden"].grad).all()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_buffer(frozen: str) -> None:
    inputs, reference = make_inputs(), make_inputs()
    inputs[frozen] = inputs[frozen].detach()
    other = {"hidden": "weight", "weight": "hidden"}[frozen]
    next_token_logprobs(**inputs, chunk=4)[0].sum().backward()
    plain(**reference)[0].sum().backward()
    assert inputs[frozen].grad is None
    torch.testing.assert_close(inputs[other].grad, reference[other].grad, rtol=1e-6, atol=1e-6)


def test_a_frozen_head_computes_no_weight_gradient() -> None:
    inputs = make_inputs()
    inputs["weight"] = inputs["weight"].detach()
    logprobs, _ = next_token_logprobs(**inputs, chunk=4)
    with Largest() as seen:
        logprobs.sum().backward()
    assert (V, H) not in seen.made


class Largest(TorchDispatchMode):
    """Remembers the shapes of all tensors that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not func.is_view:
            self.made.add(tuple(result.shape))
        return result


def test_tokens_times_vocabulary_is_never_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "VOCAB_BLOCK", 8)
    with Largest() as seen:
        next_token_logprobs(**make_inputs(), chunk=4)[0].sum().backward()
    assert max(math.prod(shape) for shape in seen.made) <= max(V * H, N * H, 4 * 8)


def test_the_parameter_itself_is_saved() -> None:
    """ZeRO 3 swaps the storage of the Parameter between forward and backward: a view would go stale."""
    inputs = make_inputs()
    weight = torch.nn.Parameter(inputs["weight"].detach())
    inputs["weight"] = weight
    logprobs, _ = next_token_logprobs(**inputs, chunk=4)
    assert any(saved is weight for saved in logprobs.grad_fn.saved_tensors)


def test_shift_right_fills_slot_0_with_a_uniform_guess() -> None:
    logprobs, entropy = shift_right(torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0.1, 0.2, 0.3]), 8)
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(8), -1.0, -2.0]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(8), 0.1, 0.2]))


def test_an_installed_head_keeps_its_parameter_and_refuses_a_bias() -> None:
    head = torch.nn.Linear(H, V, bias=False)
    install_chunked_head(head, chunk=4)
    inputs = make_inputs(torch.float32)
    logprobs, _ = head(inputs["hidden"], inputs["labels"], inputs["temperatures"])
    expected, _ = plain(inputs["hidden"], head.weight, inputs["labels"], inputs["temperatures"])
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)
    assert [name for name, _ in head.named_parameters()] == ["weight"]
    with pytest.raises(ValueError, match="bias"):
        install_chunked_head(torch.nn.Linear(H, V), chunk=4)


def test_the_compiled_kernels_compute_the_same(monkeypatch):
    """Several block widths (the last one smaller) and several row counts, as packed rows bring them."""
    monkeypatch.setattr(lm_head, "VOCAB_BLOCK", 8)
    torch._dynamo.reset()
    kernels = lm_head.compiled_kernels()
    generator = torch.Generator().manual_seed(1)
    for n in (12, 7):
        found = []
        hidden, weight = torch.randn(n, 6, generator=generator), torch.randn(20, 6, generator=generator)
        labels = torch.randint(0, 20, (n,), generator=generator)
        temperatures = 0.5 + torch.rand(n, generator=generator)
        for choice in (kernels, lm_head.EAGER):
            h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            logprobs, entropy = next_token_logprobs(h, w, labels, temperatures, 4, choice)
            logprobs.square().sum().backward()
            found.append((logprobs.detach(), entropy, h.grad, w.grad))
        for compiled, eager in zip(*found, strict=True):
            torch.testing.assert_close(compiled, eager, rtol=1e-5, atol=1e-5)
