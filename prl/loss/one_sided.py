"""The fixed rule of `loss.ref_kl=one_sided`: distillation credit drops where the policy lost probability."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.config.loss import LossConfig
from prl.loss.base import Metrics, PolicyTokens, capped_ratio, probability_shift, trust_region_metrics

LOWEST_SHIFT = -0.2
RATIO_CAP = 1e4


def one_sided(tokens: PolicyTokens, config: LossConfig) -> tuple[Tensor, Metrics]:
    """-w * a * min(rho, 1e4) unless P - B < -0.2; the loss's own settings do not act."""
    log_ratio = tokens.log_ratio
    keep = probability_shift(tokens.logprobs.detach(), tokens.behaviour_logprobs) >= LOWEST_SHIFT
    terms = torch.where(keep, -tokens.advantages * capped_ratio(log_ratio, math.log(RATIO_CAP)), 0.0)
    return tokens.weighted(terms), trust_region_metrics(log_ratio, keep)
