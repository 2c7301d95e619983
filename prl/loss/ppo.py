"""ppo: the clipped surrogate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.config.loss import PpoConfig
from prl.loss.base import Metrics, PolicyTokens, capped_ratio


def ppo(tokens: PolicyTokens, config: PpoConfig) -> tuple[Tensor, Metrics]:
    """-w * min(a' * min(rho, max_importance_ratio), a' * clip(rho, low, high)) with a' = adv_tau * a.

    The minimum takes the constant clipped branch exactly where a > 0 and rho > high, or a < 0 and
    rho < low; a < 0 with a large rho is not clipped, which is what the cap is for.
    """
    log_ratio = tokens.log_ratio
    still = log_ratio.detach()
    advantages = config.adv_tau * tokens.advantages
    above = (tokens.advantages > 0) & (still > math.log(config.ratio_high))
    below = (tokens.advantages < 0) & (still < math.log(config.ratio_low))
    log_cap = math.log(config.max_importance_ratio)
    ratio = capped_ratio(log_ratio, log_cap)
    ratio = torch.where(above, config.ratio_high, torch.where(below, config.ratio_low, ratio))
    metrics = {"is_clipped": (above | below).float(), "ratio_capped": (still > log_cap).float()}
    return tokens.weighted(-advantages * ratio), metrics
