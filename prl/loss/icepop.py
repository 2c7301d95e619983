"""icepop: drops tokens whose importance ratio leaves [ratio_low, ratio_high] (IcePop)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.config.loss import IcePopConfig
from prl.loss.base import Metrics, PolicyTokens, trust_region_metrics


def icepop(tokens: PolicyTokens, config: IcePopConfig) -> tuple[Tensor, Metrics]:
    """-w * adv_tau * a * rho where ratio_low <= rho <= ratio_high (both inclusive), else 0."""
    log_ratio = tokens.log_ratio
    still = log_ratio.detach()
    log_low = math.log(config.ratio_low) if config.ratio_low > 0 else -math.inf
    keep = (still >= log_low) & (still <= math.log(config.ratio_high))
    # A dropped ratio may overflow; it must be out of the graph before exp, not multiplied by 0 after it.
    ratio = torch.exp(torch.where(keep, log_ratio, 0.0))
    terms = torch.where(keep, -config.adv_tau * tokens.advantages * ratio, 0.0)
    return tokens.weighted(terms), trust_region_metrics(log_ratio, keep)
