"""What the routers of a mixture of experts do: how evenly they load the experts, and how sure they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RouterWatch:
    """Listens to the routers of a model; knows nothing for a model without any.

    `max_vio`, one value a layer: (load of the fullest expert - mean load) / mean load over a row's tokens.
    `routing_confidence`, one value a token: the probability that the router gives to the experts it chose,
    before they are rescaled, as the mean over layers. Padding, which all goes to the same experts, is in
    neither. `part`: which of the equal parts of a row this rank works on.
    """

    def __init__(self, model: nn.Module, part: int = 0) -> None:
        self._part = part
        self._heard: list[tuple[Tensor, Tensor, int]] = []
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter") and hasattr(module, "num_experts"):
                module.register_forward_hook(self._listen)

    def take(self, real: int) -> dict[str, Tensor]:
        """Metrics of the forward since the last call, over the first `real` tokens of the row.

        To be called before backward, which may recompute. Nothing if none of them is on this rank.
        """
        heard, self._heard = self._heard, []
        if not heard:
            return {}
        here = heard[0][0].shape[0]
        own = min(max(real - self._part * here, 0), here)
        if not own:
            return {}
        violations = [_violation(chosen[:own], experts) for chosen, _, experts in heard]
        confidences = [confidence[:own] for _, confidence, _ in heard]
        return {
            "max_vio": torch.stack(violations),
            "routing_confidence": torch.stack(confidences).mean(0),
        }

    def forget(self) -> None:
        """Drop what recomputation said again."""
        self._heard = []

    @torch.compiler.disable
    @torch.no_grad()
    def _listen(self, router: Any, _: Any, outputs: tuple[Tensor, ...]) -> None:
        logits, _, chosen = outputs
        confidence = logits.float().softmax(-1).gather(-1, chosen).sum(-1)
        self._heard.append((chosen, confidence, router.num_experts))


def _violation(chosen: Tensor, experts: int) -> Tensor:
    """Of the experts [tokens, k] that were chosen. Not bincount: on a GPU it waits for the largest number."""
    flat = chosen.flatten()
    load = torch.zeros(experts, device=flat.device)
    load.scatter_add_(0, flat, torch.ones_like(flat, dtype=load.dtype))
    return load.max() / load.mean() - 1
