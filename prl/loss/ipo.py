"""ipo: drops tokens whose probability moved by more than `eps` since they were sampled."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.config.loss import IpoConfig
from prl.loss.base import Metrics, PolicyTokens, capped_ratio, probability_shift, trust_region_metrics


def ipo(tokens: PolicyTokens, config: IpoConfig) -> tuple[Tensor, Metrics]:
    """-w * adv_tau * a * min(rho, max_importance_ratio) where |P - B| <= eps, else 0."""
    log_ratio = tokens.log_ratio
    keep = probability_shift(tokens.logprobs.detach(), tokens.behaviour_logprobs).abs() <= config.eps
    ratio = capped_ratio(log_ratio, math.log(config.max_importance_ratio))
    terms = torch.where(keep, -config.adv_tau * tokens.advantages * ratio, 0.0)
    return tokens.weighted(terms), trust_region_metrics(log_ratio, keep)
