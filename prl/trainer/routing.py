"""What the routers of a mixture of experts do: how evenly they load the experts, and how sure they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RouterWatch:
    """Listens to the routers of a model; knows nothing for a model without any.

    `max_vio`, one value a layer: (load of the fullest expert - mean load) / mean load over a row's tokens.
    `routing_confidence`, one value a token: the probability that the router gives to the experts it chose,
    before they are rescaled, as the mean over layers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._violations: list[Tensor] = []
        self._confidences: list[Tensor] = []
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter") and hasattr(module, "num_experts"):
                module.register_forward_hook(self._listen)

    def take(self) -> dict[str, Tensor]:
        """Metrics of the forward since the last call. To be called before backward, which may recompute."""
        if not self._violations:
            return {}
        found = {
            "max_vio": torch.stack(self._violations),
            "routing_confidence": torch.stack(self._confidences).mean(0),
        }
        self.forget()
        return found

    def forget(self) -> None:
        """Drop what recomputation said again."""
        self._violations, self._confidences = [], []

    @torch.compiler.disable
    @torch.no_grad()
    def _listen(self, router: Any, _: Any, outputs: tuple[Tensor, ...]) -> None:
        logits, _, chosen = outputs
        # Not bincount: on a GPU it waits to learn the largest number.
        chosen_flat = chosen.flatten()
        load = logits.new_zeros(router.num_experts, dtype=torch.float32)
        load.scatter_add_(0, chosen_flat, torch.ones_like(chosen_flat, dtype=torch.float32))
        self._violations.append(load.max() / load.mean() - 1)
        self._confidences.append(logits.float().softmax(-1).gather(-1, chosen).sum(-1))
