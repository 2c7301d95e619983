"""What a loss gets, what it gives, and the quantities that losses share.

A loss is a function `(tokens, config) -> (terms, metrics)` of the member tokens only. `terms` [members]
are weighted and sum to the component's loss before the division by its global count.

Metrics are vectors [members]. NaN in a metric means that the token is not part of it (masked tokens in
`unmasked_mismatch_kl`), which keeps shapes independent of the data: reduce them as means over numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.loss.batch import SequenceMembers

MISMATCH_KL_MAX = 1e30


@dataclass(slots=True)
class PolicyTokens:
    """Members of one policy-gradient component; all float32 [members], only `logprobs` has a gradient.

    `positions` (int64) says where in the row each member stands; `sequences` has those with members.
    """

    logprobs: Tensor
    behaviour_logprobs: Tensor
    advantages: Tensor
    weights: Tensor | None
    ref_logprobs: Tensor | None
    positions: Tensor
    sequences: list[SequenceMembers]

    @property
    def log_ratio(self) -> Tensor:
        """log(pi / mu) of each member."""
        return self.logprobs - self.behaviour_logprobs

    def weighted(self, terms: Tensor) -> Tensor:
        return terms if self.weights is None else terms * self.weights


Metrics = dict[str, Tensor]
PolicyLoss = Callable[[PolicyTokens, Any], tuple[Tensor, Metrics]]


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """k3 estimate of KL(mu || pi): rho - log rho - 1 >= 0, stable near rho = 1, capped at 1e30."""
    return (torch.expm1(log_ratio) - log_ratio).clamp(max=MISMATCH_KL_MAX)


def probability_shift(logprobs: Tensor, behaviour_logprobs: Tensor) -> Tensor:
    """P - B, the change of each token's probability, without the cancellation of two exponentials."""
    high = torch.maximum(logprobs, behaviour_logprobs)
    low = torch.minimum(logprobs, behaviour_logprobs)
    size = torch.exp(high) * -torch.expm1(low - high)
    return torch.where(logprobs >= behaviour_logprobs, size, -size)


def capped_ratio(log_ratio: Tensor, log_cap: float) -> Tensor:
    """min(rho, cap) in value; its derivative by the log ratio is its value, above the cap too."""
    still = log_ratio.detach()
    return torch.exp(still.clamp(max=log_cap) + (log_ratio - still))


def trust_region_metrics(log_ratio: Tensor, keep: Tensor) -> Metrics:
    """Share of dropped tokens, and the mismatch KL of the dropped and of the kept ones."""
    kl = mismatch_kl(log_ratio.detach())
    return {
        "is_masked": (~keep).float(),
        "masked_mismatch_kl": torch.where(keep, torch.nan, kl),
        "unmasked_mismatch_kl": torch.where(keep, kl, torch.nan),
    }
