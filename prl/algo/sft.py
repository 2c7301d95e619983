"""sft: hard distillation on the fly; a teacher samples, the policy learns its tokens by cross-entropy."""

from __future__ import annotations

from prl.algo.base import Algorithm
from prl.config.algo import SftAlgoConfig


class Sft(Algorithm[SftAlgoConfig]):
    """No scoring and no advantages: every token that the teacher sampled has a ce weight of 1."""

    action_loss = "ce"
    sampled_by = "teacher"
