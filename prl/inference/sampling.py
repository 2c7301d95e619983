"""From logits to tokens: the distribution that a request asks for, and draws from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE_VOCAB, BLOCK = 8192, 256
BELOW_ONE = 1.0 - 2.0**-40
"""The largest uniform: its product with a total never rounds up to the total."""


@dataclass(slots=True)
class Controls:
    """Sampling parameters of n rows: temperature, top_p, min_p float32 [n], top_k int64 [n] (0 = off).

    `greedy` [n] bool or None if no row is; `filtered` are the row numbers with top_p, top_k or min_p, or
    None. Greedy rows have temperature 1 here: their log-probabilities are those of the unscaled model.
    """

    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    top_k: Tensor
    greedy: Tensor | None
    filtered: Tensor | None


def processed_logprobs(logits: Tensor, controls: Controls) -> Tensor:
    """Log-probabilities [n, vocab] of the distribution actually sampled from.

    Temperature first; then min_p, top_k and top_p drop tokens and what is left is renormalised. A dropped
    token has -inf. `logits` [n, vocab] float32.
    """
    scaled = logits / controls.temperature[:, None]
    if controls.filtered is not None:
        rows = controls.filtered
        scaled[rows] = keep_likely(
            scaled[rows], controls.top_k[rows], controls.top_p[rows], controls.min_p[rows]
        )
    return torch.log_softmax(scaled, dim=-1)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """`logits` [n, vocab] with -inf for tokens outside the filters.

    min_p keeps tokens at least that likely relative to the likeliest one, top_k the k likeliest, top_p the
    smallest set of what is left whose renormalised mass reaches p (nucleus sampling, arXiv:1904.09751). The
    likeliest token always stays.
    """
    ordered, order = logits.sort(dim=-1, descending=True)
    probabilities = torch.softmax(ordered, dim=-1)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    within_k = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    keep = within_k & (probabilities >= min_p[:, None] * probabilities[:, :1])
    kept = torch.where(keep, probabilities, 0.0)
    mass_before = (kept.cumsum(dim=-1) - kept) / kept.sum(dim=-1, keepdim=True)
    keep &= (mass_before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter_(-1, order, keep), -torch.inf)


def draw(logprobs: Tensor, uniforms: Tensor, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row, and its log-probability: (tokens [n] int64, logprobs [n] float32).

    Inverts the cumulative distribution at `uniforms` [n] float64 in [0, 1), so that a row's draw depends on
    its own number only. Greedy rows take the likeliest token. A row that is not finite yields a
    log-probability that is not finite either.
    """
    weights = logprobs.exp()
    tokens = (
        _invert(weights, uniforms) if weights.shape[-1] <= LARGE_VOCAB else _invert_blocks(weights, uniforms)
    )
    if greedy is not None:
        tokens = torch.where(greedy, logprobs.argmax(dim=-1), tokens)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _invert(weights: Tensor, uniforms: Tensor) -> Tensor:
    """First index [n] where the running sum of `weights` [n, k] exceeds `uniforms` [n] of the whole."""
    mass = weights.cumsum(dim=-1, dtype=torch.float64)
    found = torch.searchsorted(mass, uniforms[:, None] * mass[:, -1:], right=True)
    return found[:, 0].clamp_(max=weights.shape[-1] - 1)


def _invert_blocks(weights: Tensor, uniforms: Tensor) -> Tensor:
    """As `_invert`, first among sums of blocks and then inside one: a running sum over a large vocabulary
    would be as slow as the layers of a small model."""
    count, vocab = weights.shape
    padded = F.pad(weights, (0, -vocab % BLOCK)) if vocab % BLOCK else weights
    blocks = padded.view(count, -1, BLOCK)
    mass = F.pad(blocks.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64), (1, 0))
    wanted = uniforms * mass[:, -1]
    number = torch.searchsorted(mass[:, 1:].contiguous(), wanted[:, None], right=True)
    number.clamp_(max=blocks.shape[1] - 1)
    before, after = mass.gather(1, number)[:, 0], mass.gather(1, number + 1)[:, 0]
    inside = blocks[torch.arange(count, device=weights.device), number[:, 0]]
    rest = ((wanted - before) / (after - before)).clamp(0.0, BELOW_ONE)
    return (number[:, 0] * BLOCK + _invert(inside, rest)).clamp_(max=vocab - 1)


def ban_tokens(logits: Tensor, rows: Tensor, token_ids: Tensor) -> None:
    """Set `logits[rows[i], token_ids[i, j]]` to -inf, in place; `token_ids` [len(rows), k] int64, an entry of
    -1 standing for no token. A ban on the whole vocabulary is ignored."""
    banned = torch.zeros(len(rows), logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    banned.scatter_(-1, torch.where(token_ids < 0, logits.shape[-1], token_ids), True)
    banned = banned[:, :-1] & ~banned[:, :-1].all(dim=-1, keepdim=True)
    logits[rows] = logits[rows].masked_fill(banned, -torch.inf)
