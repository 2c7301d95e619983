"""Any torch optimizer's state as named fragments plus scalars, found by looking, not by class.

State tensors shaped like what they belong to (`exp_avg`, `momentum_buffer`, …) become fragments; numbers
and 0-d tensors (`step`) become scalars, kept per parameter name. A fresh optimizer has no state yet: what
the checkpoint holds is created first, then filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from prl.checkpoint.fragments import ZeroFragment
from prl.checkpoint.zero import Partition

Scalars = dict[str, dict[str, Any]]
"""Parameter name -> state key -> a number, or `{"dtype", "value"}` of a 0-d tensor."""


def state_fragments(optimizer: torch.optim.Optimizer, parts: list[Partition]) -> dict[str, ZeroFragment]:
    """`optim.<key>.<parameter>` -> fragment, for every state tensor on this rank.

    Raises ValueError for a state tensor that has not one entry per parameter element.
    """
    found: dict[str, ZeroFragment] = {}
    for part in parts:
        for key, value in optimizer.state.get(part.flat, {}).items():
            if _is_scalar(key, value, part.flat):
                continue
            if value.shape != part.flat.shape:
                raise ValueError(
                    f"optimizer {type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for "
                    f"weights of shape {tuple(part.flat.shape)}: only state per weight can be saved"
                )
            found |= {f"optim.{key}.{name}": piece for name, piece in part.fragments(value).items()}
    return found


def scalars(optimizer: torch.optim.Optimizer, parts: list[Partition]) -> Scalars:
    """The scalar state of every parameter. Each rank knows all of them."""
    found: Scalars = {}
    for part in parts:
        state = optimizer.state.get(part.flat, {})
        values = {key: _encode(value) for key, value in state.items() if _is_scalar(key, value, part.flat)}
        if values:
            found |= dict.fromkeys(part.names, values)
    return found


def prepare(
    optimizer: torch.optim.Optimizer,
    parts: list[Partition],
    dtypes: Mapping[str, torch.dtype],
    saved: Scalars,
) -> None:
    """Give a fresh optimizer the scalars of a checkpoint and zero buffers for the rest of its state.

    `dtypes`: `optim.<key>.<parameter>` -> stored dtype.
    """
    stored: dict[str, dict[str, torch.dtype]] = {}
    for entry, dtype in dtypes.items():
        _, key, name = entry.split(".", 2)
        stored.setdefault(name, {})[key] = dtype
    for part in parts:
        state, options = optimizer.state[part.flat], optimizer.param_groups[part.group]
        for name in part.names:
            for key, dtype in stored.get(name, {}).items():
                if key not in state:
                    state[key] = torch.zeros_like(part.flat, dtype=dtype, requires_grad=False)
        on_device = options.get("fused") or options.get("capturable")
        device = part.flat.device if on_device else torch.device("cpu")
        state.update({key: _decode(value, device) for key, value in _merge(saved, part.names).items()})


def _is_scalar(key: str, value: Any, flat: Tensor) -> bool:
    """Whether it is one value for all weights. A 0-d parameter has 0-d moments, so `step` goes by name."""
    return key == "step" or not isinstance(value, Tensor) or value.dim() < flat.dim()


def _merge(saved: Scalars, names: list[str]) -> dict[str, Any]:
    """Scalars of a buffer of several parameters. They differ only if some had no gradient at stage 0."""
    entries = [saved[name] for name in names if name in saved]
    return max(entries, key=lambda entry: _number(entry.get("step", 0)), default={})


def _encode(value: Any) -> Any:
    if isinstance(value, Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "value": value.item()}
    return value


def _decode(value: Any, device: torch.device) -> Any:
    if isinstance(value, dict):
        return torch.tensor(value["value"], dtype=getattr(torch, value["dtype"]), device=device)
    return value


def _number(value: Any) -> Any:
    return value["value"] if isinstance(value, dict) else value
