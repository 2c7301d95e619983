"""Arithmetic of a training step and what the device could do: the two halves of MFU."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from prl.orchestrator.cost import RowCost, cost_from_config

log = logging.getLogger(__name__)

FORMULA = "6 * matmul parameters (with LM head) + 12 * layers * heads * head_dim * context / 2, per token"
"""Model FLOPs of a token, forward and backward: causal attention counts once, recomputation does not.

`context` is the length of the token's own document.
"""

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "H800": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Dense bfloat16 FLOP/s of the manufacturer's data sheet, by a part of the device's name."""


def model_cost(config: Any) -> RowCost:
    """Forward FLOPs of a row, from a Hugging Face config; 0, with a warning, when that names no sizes."""
    try:
        return cost_from_config(config.get_text_config().to_dict())
    except (KeyError, TypeError) as error:
        log.warning("no FLOP count for %s: its config says nothing about %s", config.model_type, error)
        return RowCost(0.0, 0.0)


def training_flops(cost: RowCost, rows: Iterable[Sequence[int]]) -> float:
    """FLOPs of forward and backward of rows, each given by the lengths of its documents (see `FORMULA`)."""
    return 3.0 * sum(cost.of(lengths) for lengths in rows)


def peak_flops(device: torch.device) -> float | None:
    """bfloat16 FLOP/s of `device`; None for one that is not in the table, CPUs among them."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
