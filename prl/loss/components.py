"""The loss of a packed row: rl + ce + ref_kl, each a sum over its members over its own global count."""

from __future__ import annotations

from importlib import import_module

import torch
from torch import Tensor

from prl.config.loss import LossConfig
from prl.loss.base import Metrics, PolicyLoss, PolicyTokens, mismatch_kl
from prl.loss.batch import MicroBatchTensors
from prl.records import Component

LOSSES: dict[str, str] = {
    "ipo": "prl.loss.ipo",
    "icepop": "prl.loss.icepop",
    "ppo": "prl.loss.ppo",
    "cispo": "prl.loss.cispo",
    "custom": "prl.loss.custom",
    "one_sided": "prl.loss.one_sided",
}
"""Name -> module that holds the function of that name. `one_sided` is for ref_kl only."""


class NonFiniteLoss(ValueError):
    """A logprob or loss term of a member is NaN or infinite."""


class FiniteCheck:
    """Whether all logprobs and loss terms of a row's members are finite: a verdict that lies on the device.

    `logprobs` [n] and `terms` [members of each component], without gradient.
    """

    def __init__(self, micro: MicroBatchTensors, logprobs: Tensor, terms: dict[Component, Tensor]) -> None:
        self._micro, self._logprobs, self._terms = micro, logprobs, terms
        used = torch.cat([logprobs[micro.members[component]] for component in terms])
        self.finite = torch.isfinite(used).all() & torch.isfinite(torch.cat(list(terms.values()))).all()
        """Boolean scalar."""

    def explain(self) -> None:
        """Raise NonFiniteLoss, naming the sample and the token, if the verdict is false."""
        for component, term in self._terms.items():
            members = self._micro.members[component]
            for name, found in (
                ("the trainer's logprob", self._logprobs[members]),
                (f"the {component} loss", term),
            ):
                bad = (~torch.isfinite(found)).nonzero()
                if len(bad):
                    first = int(bad[0])
                    where = self._micro.describe(int(members[first]))
                    raise NonFiniteLoss(f"{where}: {name} is {float(found[first])}; it must be finite")


def count_members(micro: MicroBatchTensors) -> dict[str, float]:
    """This row's share of each denominator: sum of weights for rl, member tokens for ce and ref_kl.

    Sum over all rows of all ranks before `compute_loss`. No device is touched.
    """
    return {str(component): count for component, count in micro.counts.items()}


def compute_loss(
    micro: MicroBatchTensors,
    logprobs: Tensor,
    counts: dict[str, float],
    loss_config: LossConfig,
    later: list[FiniteCheck] | None = None,
) -> tuple[Tensor, Metrics]:
    """Scalar loss of one row, divided by the global counts, and its metrics.

    Args:
        logprobs: [n]; entry i speaks about token i given those before it, at the token's temperature.
        counts: denominators over the whole global batch, from `count_members`; 0 means no member anywhere.
        later: takes the check that everything is finite, instead of waiting for the device here.

    Returns:
        The loss (float32, always connected to `logprobs`, so a row without members runs backward too) and
        metrics: detached vectors over tokens in which NaN marks a token that is not part of the metric.
        `loss` are the terms of all members, weighted, before the division. `mismatch_kl/all` and
        `mismatch_kl/<env>` cover rl and ref_kl members under the mask, `nll` the ce members, `ref_kl` (q - l)
        the ref_kl members; those of the loss itself carry the prefix `ref_kl/` where they come from
        distillation credit.

    Raises:
        NonFiniteLoss: a logprob or loss term of a member is not finite; names the sample and the token.
    """
    assert logprobs.shape == micro.advantages.shape, (
        f"{tuple(logprobs.shape)} logprobs for {len(micro)} tokens"
    )
    logprobs = logprobs.float()
    terms: dict[Component, Tensor] = {}
    metrics = _mismatch_metrics(micro, logprobs.detach())
    if len(micro.members["rl"]):
        terms["rl"], own = policy_loss(loss_config.name)(_rl_tokens(micro, logprobs), loss_config)
        metrics |= own
    if len(micro.members["ce"]):
        nll = -logprobs[micro.members["ce"]]
        terms["ce"] = micro.weights["ce"][micro.members["ce"]] * nll
        metrics["nll"] = nll.detach()
    if len(micro.members["ref_kl"]):
        rule = loss_config.name if loss_config.ref_kl == "same" else loss_config.ref_kl
        tokens = _ref_kl_tokens(micro, logprobs)
        terms["ref_kl"], own = policy_loss(rule)(tokens, loss_config)
        metrics |= {f"ref_kl/{name}": values for name, values in own.items()}
        metrics["ref_kl"] = tokens.advantages
    if terms:
        metrics["loss"] = torch.cat(list(terms.values())).detach()
        check = FiniteCheck(micro, logprobs.detach(), {c: term.detach() for c, term in terms.items()})
        if later is not None:
            later.append(check)
        elif not bool(check.finite):
            check.explain()
    # The empty sum ties the loss to the graph without touching a value that may be NaN.
    loss = logprobs[:0].sum()
    for component, values in terms.items():
        loss = loss + values.sum() / (counts[component] or 1.0)
    return loss, metrics


def policy_loss(name: str) -> PolicyLoss:
    """The function of a loss. Raises ValueError for an unknown name."""
    if name not in LOSSES:
        raise ValueError(f"loss.name={name!r} is unknown; choose one of {', '.join(LOSSES)}")
    return getattr(import_module(LOSSES[name]), name)


def _rl_tokens(micro: MicroBatchTensors, logprobs: Tensor) -> PolicyTokens:
    return _policy_tokens(micro, "rl", logprobs, micro.advantages[micro.members["rl"]])


def _ref_kl_tokens(micro: MicroBatchTensors, logprobs: Tensor) -> PolicyTokens:
    """The credit is sg(q - l): one sample of the negative reverse KL to the reference."""
    assert micro.ref_logprobs is not None
    members = micro.members["ref_kl"]
    return _policy_tokens(micro, "ref_kl", logprobs, micro.ref_logprobs[members] - logprobs[members].detach())


def _policy_tokens(
    micro: MicroBatchTensors, component: Component, logprobs: Tensor, advantages: Tensor
) -> PolicyTokens:
    members = micro.members[component]
    weights = micro.weights.get(component)
    return PolicyTokens(
        logprobs=logprobs[members],
        behaviour_logprobs=micro.inference_logprobs[members],
        advantages=advantages,
        weights=None if weights is None else weights[members],
        ref_logprobs=None if micro.ref_logprobs is None else micro.ref_logprobs[members],
        positions=members,
        sequences=micro.sequences[component],
    )


def _mismatch_metrics(micro: MicroBatchTensors, logprobs: Tensor) -> Metrics:
    log_ratio = logprobs - micro.inference_logprobs
    return {
        f"mismatch_kl/{key}": mismatch_kl(log_ratio[positions])
        for key, positions in micro.policy.items()
        if len(positions)
    }
