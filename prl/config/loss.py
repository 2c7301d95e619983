"""Schema of the `loss` group: the trust region of every policy-gradient token. Behaviour: `prl/loss/`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prl.config.fields import opt


@dataclass
class LossConfig:
    """What every loss has."""

    name: str = opt(doc="Name of the loss.")
    ref_kl: str = opt(
        "same",
        "Rule for distillation credit: this loss, or the fixed one-sided rule (drop where P - B < -0.2).",
        choices=("same", "one_sided"),
    )


@dataclass
class IpoConfig(LossConfig):
    """Drops tokens whose probability moved by more than `eps`."""

    name: str = "ipo"
    eps: float = opt(0.3, "Largest |P - B| of a kept token.", ge=0)
    adv_tau: float = opt(1.0, "Factor on the advantage.", ge=0)
    max_importance_ratio: float = opt(1e4, "Cap on the importance ratio.", gt=0)


@dataclass
class IcePopConfig(LossConfig):
    """Drops tokens whose importance ratio leaves [ratio_low, ratio_high]."""

    name: str = "icepop"
    ratio_low: float = opt(0.2, "Lowest kept importance ratio.", ge=0)
    ratio_high: float = opt(5.0, "Highest kept importance ratio.", gt=0)
    adv_tau: float = opt(1.0, "Factor on the advantage.", ge=0)


@dataclass
class PpoConfig(LossConfig):
    """Clipped surrogate."""

    name: str = "ppo"
    ratio_low: float = opt(0.8, "Lower clip.", gt=0, le=1)
    ratio_high: float = opt(1.2, "Upper clip.", ge=1)
    max_importance_ratio: float = opt(1e4, "Cap on the importance ratio where the clip does not act.", gt=0)
    adv_tau: float = opt(1.0, "Factor on the advantage.", ge=0)


@dataclass
class CispoConfig(LossConfig):
    """Clips the importance weight, never the gradient of the logprob."""

    name: str = "cispo"
    ratio_low: float = opt(0.0, "Lower clip; 0 disables it.", ge=0)
    ratio_high: float = opt(5.0, "Upper clip.", gt=0)
    adv_tau: float = opt(1.0, "Factor on the advantage.", ge=0)


@dataclass
class CustomLossConfig(LossConfig):
    """A loss of your own, by import path."""

    name: str = "custom"
    import_path: str = opt(doc="`package.module:function(inputs, **kwargs)`.")
    kwargs: dict[str, Any] = opt(factory=dict, doc="Arguments of the function.")
