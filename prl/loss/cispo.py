"""cispo: clips the importance weight, so every token keeps the gradient of its logprob (MiniMax-M1)."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.config.loss import CispoConfig
from prl.loss.base import Metrics, PolicyTokens


def cispo(tokens: PolicyTokens, config: CispoConfig) -> tuple[Tensor, Metrics]:
    """-w * sg(clip(rho, ratio_low, ratio_high)) * adv_tau * a * l."""
    ratio = torch.exp(tokens.log_ratio.detach())
    clipped = ratio.clamp(config.ratio_low, config.ratio_high)
    terms = -config.adv_tau * tokens.advantages * clipped * tokens.logprobs
    return tokens.weighted(terms), {"is_clipped": (clipped != ratio).float()}
