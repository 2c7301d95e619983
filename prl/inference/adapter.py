"""A LoRA adapter in the embedded engine: merged into the served weights, from the unchanged base each time.

W = W0 + s · B · A (arXiv:2106.09685) with s = alpha / r, or alpha / sqrt(r) under rank-stabilised LoRA
(arXiv:2312.03732), computed in float32. Tensors carry PEFT's names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from prl.inference.dense_weights import DenseWeights, TornWeights
from prl.sync.weight_files import TensorSpec

PREFIX = "base_model.model."
PART_A, PART_B = ".lora_A.weight", ".lora_B.weight"
PLAIN = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
}
"""Settings of adapter_config.json -> the values under which an adapter is nothing but A and B."""


class MergedAdapter:
    """The adapter that an engine serves, and the base weights beneath it."""

    def __init__(self, weights: DenseWeights) -> None:
        self._weights = weights
        self._base: dict[str, Tensor] = {}
        self.tensors: dict[str, Tensor] = {}

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(PEFT's name, tensor in the engine's memory) of the adapter that is merged now."""
        yield from self.tensors.items()

    def load(self, config: Mapping[str, Any], specs: Mapping[str, TensorSpec], source: Any) -> None:
        """Merge the adapter of `source` in place of the one before it.

        Raises ValueError, before anything is changed, if it does not fit the model or is more than A and B;
        TornWeights if merging fails half way.
        """
        scaling = adapter_scaling(config)
        targets = self._targets(specs)
        received = {name: tensor.to(self._weights.embedding.device, copy=True) for name, tensor in source}
        try:
            self._restore()
            for target, module in targets.items():
                part_a, part_b = received[f"{module}{PART_A}"], received[f"{module}{PART_B}"]
                served = self._weights.named[target]
                self._base[target] = served.clone()
                served.copy_(served.float() + scaling * (part_b.float() @ part_a.float()))
        except Exception as error:
            raise TornWeights(f"adapter half merged: {error}") from error
        self.tensors = received

    def forget(self) -> None:
        """Whole weights have come: there is no base beneath them any more."""
        self._base, self.tensors = {}, {}

    def _restore(self) -> None:
        for name, base in self._base.items():
            self._weights.named[name].copy_(base)
        self._base = {}

    def _targets(self, specs: Mapping[str, TensorSpec]) -> dict[str, str]:
        """Weight that is adapted -> PEFT's name of its module. Raises ValueError for what does not fit."""
        faults, targets = [], {}
        modules = sorted({name.removesuffix(PART_A).removesuffix(PART_B) for name in specs})
        for module in modules:
            target = f"{module.removeprefix(PREFIX)}.weight"
            served = self._weights.named.get(target)
            parts = [specs.get(f"{module}{part}") for part in (PART_A, PART_B)]
            if served is None or parts[0] is None or parts[1] is None:
                faults.append(f"{module} is not an adapted weight of this model")
                continue
            shape = (parts[1].shape[0], parts[0].shape[1])
            if shape != tuple(served.shape) or parts[0].shape[0] != parts[1].shape[1]:
                faults.append(f"{module} adapts {list(shape)}, the model's is {list(served.shape)}")
            targets[target] = module
        if faults:
            raise ValueError(f"this adapter does not fit: {'; '.join(faults[:5])}")
        return targets


def adapter_scaling(config: Mapping[str, Any]) -> float:
    """The factor before B · A. Raises ValueError for settings that change more than that."""
    for key, neutral in PLAIN.items():
        value = config.get(key)
        if value is not None and value not in neutral:
            raise ValueError(f"adapter_config.json: {key}={value!r} is not served by the embedded engine")
    rank = config["r"]
    return float(config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank))
