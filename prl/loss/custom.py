"""custom: a loss of the user's own, called once per sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from prl.config.loss import CustomLossConfig
from prl.import_path import load_object
from prl.loss.base import Metrics, PolicyTokens


@dataclass(slots=True)
class LossInputs:
    """One sequence; all tensors are 1-D of its length. Places outside `loss_mask` hold 0.

    `loss_mask` is True on the tokens that the loss must sum over. For distillation credit `advantages` is
    `ref_logprobs` minus the policy's logprobs, without gradient.
    """

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


@dataclass(slots=True)
class LossOutput:
    """`loss`: scalar, the weighted SUM over members; prl divides. `metrics`: scalars or 1-D tensors."""

    loss: Tensor
    metrics: Metrics = field(default_factory=dict)


def custom(tokens: PolicyTokens, config: CustomLossConfig) -> tuple[Tensor, Metrics]:
    """Terms and metrics of the function at `loss.import_path`, one sequence after the other."""
    function = _load(config.import_path)
    terms: list[Tensor] = []
    metrics: dict[str, list[Tensor]] = {}
    for start, length, first, count in tokens.sequences:
        output = function(_inputs(tokens, start, length, slice(first, first + count)), **config.kwargs)
        _check_output(output, config.import_path)
        # The loss of a whole sequence stands at its first member, so that an error can name the sample.
        terms.append(torch.nn.functional.pad(output.loss.reshape(1), (0, count - 1)))
        for name, value in output.metrics.items():
            metrics.setdefault(name, []).append(value.detach().float().reshape(-1))
    return torch.cat(terms), {name: torch.cat(values) for name, values in metrics.items()}


@lru_cache
def _load(import_path: str) -> Callable[..., Any]:
    return load_object(import_path, "loss.import_path")


def _inputs(tokens: PolicyTokens, start: int, length: int, members: slice) -> LossInputs:
    places = tokens.positions[members] - start

    def spread(values: Tensor) -> Tensor:
        return values.new_zeros(length).index_copy(0, places, values[members])

    return LossInputs(
        trainer_logprobs=spread(tokens.logprobs),
        inference_logprobs=spread(tokens.behaviour_logprobs),
        ref_logprobs=None if tokens.ref_logprobs is None else spread(tokens.ref_logprobs),
        advantages=spread(tokens.advantages),
        loss_mask=spread(torch.ones_like(tokens.advantages)).bool(),
        loss_weights=None if tokens.weights is None else spread(tokens.weights),
    )


def _check_output(output: Any, import_path: str) -> None:
    loss = getattr(output, "loss", None)
    if (
        not isinstance(loss, Tensor)
        or loss.numel() != 1
        or not isinstance(getattr(output, "metrics", None), dict)
    ):
        raise ValueError(
            f"loss.import_path={import_path!r} must return an object with `loss` (a tensor of one number) "
            "and `metrics` (a dict), such as prl.loss.custom.LossOutput"
        )
