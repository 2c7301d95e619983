"""Chunked LM head: logprob and entropy of every token without ever holding [tokens, vocabulary].

Shapes: n tokens, h hidden size, V vocabulary. Logits exist for one chunk of tokens times one block of the
vocabulary at a time, forward and backward; backward recomputes them. The head works at every ZeRO stage
because it stays the module's own forward: ZeRO-3 gathers its weight once around forward and once around
backward, however many chunks there are, and sees the Parameter itself among the saved tensors.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

VOCAB_BLOCK = 8192
"""Columns of logits held at a time."""


class Running(NamedTuple):
    """What the columns seen so far amount to; each [c] in float32 (float64 for float64 input).

    The online logsumexp: `maximum` m, `total` sum exp(z - m), `weighted` sum exp(z - m) (z - m), both moved
    along when m grows, and `picked` z[y]. Then logsumexp(z) = m + log total and
    H = log total - weighted / total, which does not cancel however large the logits are.
    """

    maximum: Tensor
    total: Tensor
    weighted: Tensor
    picked: Tensor


class Kernels(NamedTuple):
    """The element-wise work on one block of logits; the matrix products stay outside."""

    forward: Callable[..., Running]
    backward: Callable[..., Tensor]


def block_forward(logits: Tensor, local: Tensor, temperatures: Tensor, running: Running) -> Running:
    """`running` after one more block of columns.

    logits [c, w] before the temperature; `local` [c] int32: the label's place in this block, if it has one.
    """
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    inside = (local >= 0) & (local < logits.shape[1])
    own = scaled.gather(1, local.clamp(0, logits.shape[1] - 1).long()[:, None])[:, 0]
    maximum = torch.maximum(running.maximum, scaled.amax(1))
    grown = running.maximum - maximum
    shifted = scaled - maximum[:, None]
    weights = torch.exp(shifted)
    return Running(
        maximum,
        running.total * torch.exp(grown) + weights.sum(1),
        (running.weighted + running.total * grown) * torch.exp(grown) + (weights * shifted).sum(1),
        running.picked + torch.where(inside, own, 0.0),
    )


def block_backward(
    logits: Tensor, local: Tensor, temperatures: Tensor, normalizer: Tensor, slope: Tensor
) -> Tensor:
    """slope * (one-hot - softmax), the gradient by `logits` [c, w]; slope = dL/dl / temperature."""
    scaled = logits.to(temperatures.dtype) / temperatures[:, None]
    hit = local[:, None] == torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    softmax = torch.exp(scaled - normalizer[:, None])
    return ((hit.to(scaled.dtype) - softmax) * slope[:, None]).to(logits.dtype)


EAGER = Kernels(block_forward, block_backward)


@lru_cache(maxsize=1)
def compiled_kernels() -> Kernels:
    """The same in two fused kernels: a GPU then reads each block of logits instead of writing ten copies.

    The width of a block is compiled in, its number of tokens is not: dividing every element's index by a
    width that is only known at run time makes the backward kernel four times slower.
    """
    return Kernels(_of_fixed_width(block_forward), _of_fixed_width(block_backward))


def _of_fixed_width(function: Callable[..., Any]) -> Callable[..., Any]:
    compiled = torch.compile(function)

    def run(logits: Tensor, *rest: Any) -> Any:
        torch._dynamo.mark_static(logits, 1)
        return compiled(logits, *rest)

    return run


class ChunkedLogprobs(torch.autograd.Function):
    """l = z[y] - logsumexp(z), H = logsumexp(z) - sum softmax(z) z; z = hidden @ weight.T / temperature.

    H carries no gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperatures: Tensor,
        chunk: int,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor]:
        ctx.chunk, ctx.kernels = chunk, kernels
        parts = []
        for rows in _slices(hidden.shape[0], chunk):
            running = _nothing_yet(temperatures[rows])
            for columns in _slices(weight.shape[0], VOCAB_BLOCK):
                logits = hidden[rows] @ weight[columns].t()
                local = _places(labels[rows], columns)
                running = kernels.forward(logits, local, temperatures[rows], running)
            parts.append(running)
        maximum, total, weighted, picked = (torch.cat(part) for part in zip(*parts, strict=True))
        normalizer = maximum + total.log()
        entropy = total.log() - weighted / total
        ctx.save_for_backward(hidden, weight, labels, temperatures, normalizer)
        ctx.mark_non_differentiable(entropy)
        return picked - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, grad_logprobs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, temperatures, normalizer = ctx.saved_tensors
        slope = grad_logprobs / temperatures
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=slope.dtype) if wants_hidden else None
        grad_weight = torch.empty_like(weight) if wants_weight else None
        for columns in _slices(weight.shape[0], VOCAB_BLOCK):
            block = weight[columns]
            block_grad = torch.zeros_like(block, dtype=slope.dtype) if wants_weight else None
            for rows in _slices(hidden.shape[0], ctx.chunk):
                grad = ctx.kernels.backward(
                    hidden[rows] @ block.t(),
                    _places(labels[rows], columns),
                    temperatures[rows],
                    normalizer[rows],
                    slope[rows],
                )
                if grad_hidden is not None:
                    grad_hidden[rows] += grad @ block
                if block_grad is not None:
                    block_grad += grad.t() @ hidden[rows]
            if grad_weight is not None and block_grad is not None:
                grad_weight[columns] = block_grad
        grad_hidden = None if grad_hidden is None else grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _nothing_yet(like: Tensor) -> Running:
    lowest = torch.finfo(like.dtype).min / 2  # finite, as 0 * inf would be NaN
    return Running(torch.full_like(like, lowest), *(torch.zeros_like(like) for _ in range(3)))


def _places(labels: Tensor, columns: slice) -> Tensor:
    """Places of the labels among the columns, int32: 64-bit comparisons of every logit would take longer."""
    return (labels - columns.start).to(torch.int32)


def _slices(length: int, step: int) -> list[slice]:
    return [slice(low, min(low + step, length)) for low in range(0, length, step)]


def next_token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperatures: Tensor,
    chunk: int,
    kernels: Kernels = EAGER,
) -> tuple[Tensor, Tensor]:
    """Logprob of `labels[i]` given `hidden[i]`, and the entropy there.

    hidden [n, h], weight [V, h] (the Parameter), labels [n] int64, temperatures [n]; `chunk` tokens at a
    time, 0 = all n. Returns float32 [n] twice (float64 for float64 input).
    """
    precise = torch.promote_types(hidden.dtype, torch.float32)
    rows = chunk or max(hidden.shape[0], 1)
    return ChunkedLogprobs.apply(hidden, weight, labels, temperatures.to(precise), rows, kernels)


def shift_right(logprobs: Tensor, entropy: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Move [n] values so that index i speaks about token i; slot 0 gets those of a uniform guess."""
    first = logprobs.new_full((1,), math.log(vocabulary))
    return torch.cat([-first, logprobs[:-1]]), torch.cat([first, entropy[:-1]])


def install_chunked_head(head: nn.Linear, chunk: int, kernels: Kernels = EAGER) -> None:
    """Make `head(hidden, labels, temperatures)` return (logprobs, entropy), see `next_token_logprobs`.

    Raises ValueError for a head with a bias.
    """
    if head.bias is not None:
        raise ValueError("the chunked LM head supports no bias; this model's output layer has one")

    def forward(
        self: nn.Linear, hidden: Tensor, labels: Tensor, temperatures: Tensor
    ) -> tuple[Tensor, Tensor]:
        return next_token_logprobs(hidden, self.weight, labels, temperatures, chunk, kernels)

    head.forward = types.MethodType(forward, head)  # type: ignore[method-assign]
