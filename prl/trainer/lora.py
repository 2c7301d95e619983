"""Low-rank adapters by PEFT, injected in place: W x + (alpha / rank) B A x, only A and B are trained.

The model keeps its class and its forward; an adapted layer `q_proj` becomes `q_proj.base_layer`,
`q_proj.lora_A.default` and `q_proj.lora_B.default`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from prl.config.training import LoraConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before a module's name in an adapter file."""


class Adapter(NamedTuple):
    """One adapted layer: its name, the weights [out, in], A [rank, in], B [out, rank], and alpha / rank."""

    name: str
    base: nn.Parameter
    a: nn.Parameter
    b: nn.Parameter
    scaling: float


def install_lora(policy: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze `policy` and give it adapters that change nothing yet (B = 0, A random from `seed`).

    Raises ValueError if none of `lora.targets` is a linear layer of the model.
    """
    if not lora.rank:
        return
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    linear = {name.rpartition(".")[2] for name, m in policy.named_modules() if isinstance(m, nn.Linear)}
    targets = sorted(linear.intersection(lora.targets))
    if not targets:
        raise ValueError(
            f"lora.targets={lora.targets}: the model has none of them, but {', '.join(sorted(linear))}"
        )
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=policy.config._name_or_path or None,
    )
    dtype = policy.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)
    policy.prl_adapter_config = _plain(config.to_dict() | {"inference_mode": True})


def adapter_config(policy: nn.Module) -> dict[str, Any] | None:
    """Content of `adapter_config.json`, or None for a model without adapters."""
    return getattr(policy, "prl_adapter_config", None)


def adapters(policy: nn.Module) -> Iterator[Adapter]:
    """All adapted layers, in the order of the model."""
    for name, module in policy.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            yield Adapter(name, module.base_layer.weight, a, b, module.scaling["default"])


def merge(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """base + scaling B A, added in float32 (float64 for float64 weights), in the type of `base`."""
    precise = torch.promote_types(base.dtype, torch.float32)
    return torch.addmm(base.to(precise), b.to(precise), a.to(precise), alpha=scaling).to(base.dtype)


def peft_names(adapter: Adapter) -> dict[str, nn.Parameter]:
    """The two tensors of an adapted layer under the names of an adapter file."""
    prefix = f"{PEFT_PREFIX}{adapter.name}"
    return {f"{prefix}.lora_A.weight": adapter.a, f"{prefix}.lora_B.weight": adapter.b}


def _plain(value: Any) -> Any:
    """Sets as lists and enumerations as their values, so that it is JSON."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, set | frozenset | tuple | list):
        entries = sorted(value) if isinstance(value, set | frozenset) else value
        return [_plain(entry) for entry in entries]
    return getattr(value, "value", value)
