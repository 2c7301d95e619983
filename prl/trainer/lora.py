"""Low-rank adapters, injected in place: W x + (alpha / rank) B A x, only A and B are trained.

The model keeps its class and its forward. Linear layers get theirs from PEFT: an adapted layer `q_proj`
becomes `q_proj.base_layer`, `q_proj.lora_A.default` and `q_proj.lora_B.default`; stacked experts (`EXPERTS`)
get them from `prl.trainer.expert_lora`. Modules of `lora.modules_to_save` are trained where they are, without
a copy; an adapter file has them whole, as PEFT expects.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from prl.checkpoint.experts import PARTS, is_stacked
from prl.config.training import EXPERTS, LoraConfig
from prl.trainer.expert_lora import ExpertAdapter, expert_modules, install_expert_adapters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before a module's name in an adapter file."""

TIED = "prl_tied"
"""Key of an adapter's config, not PEFT's: second name of a weight that is trained in full -> its first."""


class Adapter(NamedTuple):
    """One adapted layer: its name, the weights [out, in], A [rank, in], B [out, rank], and alpha / rank."""

    name: str
    base: nn.Parameter
    a: nn.Parameter
    b: nn.Parameter
    scaling: float


def install_lora(policy: PreTrainedModel, lora: LoraConfig, seed: int) -> None:
    """Freeze `policy` and give it adapters that change nothing yet (B = 0, A random from `seed`).

    `policy` may be sharded already: nothing is read of its weights. Raises ValueError if the model has none
    of `lora.targets`, or `lora.modules_to_save` names what cannot be saved so.
    """
    if not lora.rank:
        return
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    targets = _targets(policy, lora)
    linear = [name for name in targets if name != EXPERTS]
    saved = saved_modules(policy, lora)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=linear,
        task_type="CAUSAL_LM",
        base_model_name_or_path=policy.config._name_or_path or None,
    )
    dtype = policy.dtype
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if linear:
            inject_adapter_in_model(config, policy)
        if EXPERTS in targets:
            install_expert_adapters(policy, lora)
    whole = {id(p) for name in saved for p in policy.get_submodule(name).parameters()}
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(is_low_rank(name) or id(parameter) in whole)
        if is_low_rank(name):
            parameter.data = parameter.data.to(dtype)
    tied = _second_names(policy, whole)
    names = [*saved, *(name.rpartition(".")[0] for pair in tied.items() for name in pair)]
    extra = {"inference_mode": True, "modules_to_save": sorted(set(names)) or None, TIED: tied}
    policy.prl_adapter_config = _plain(config.to_dict() | {"target_modules": targets} | extra)


def _targets(policy: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """What of `lora.targets` the model has, sorted. Raises ValueError if that is nothing."""
    there = {name.rpartition(".")[2] for name, m in policy.named_modules() if isinstance(m, nn.Linear)}
    if expert_modules(policy):
        there.add(EXPERTS)
    elif EXPERTS in lora.targets and any(
        n.endswith(".experts.down_proj") for n, _ in policy.named_parameters()
    ):
        kind = policy.config.model_type
        log.warning("the experts of %s get no adapters: its files do not name them one by one", kind)
    if not (found := sorted(there.intersection(lora.targets))):
        raise ValueError(
            f"lora.targets={lora.targets}: the model has none of them, but {', '.join(sorted(there))}"
        )
    return found


def is_low_rank(name: str) -> bool:
    """Whether parameter `name` is an A or a B."""
    return ".lora_A" in name or ".lora_B" in name


def saved_modules(policy: PreTrainedModel, lora: LoraConfig) -> list[str]:
    """Full names of the modules of `lora.modules_to_save`; as in PEFT, those that end with one of them.

    Raises ValueError for one that ends no name, and for modules of which PEFT's files cannot hold the
    parameters: stacked experts, modules made of modules, and layers that get an adapter.
    """
    modules = {name: module for name, module in policy.named_modules() if name}
    found = []
    for ending in lora.modules_to_save:
        names = [name for name in modules if name.endswith(ending)]
        if not names:
            single = sorted({n.rpartition(".")[2] for n, m in modules.items() if not any(m.children())})
            raise ValueError(
                f"lora.modules_to_save={ending}: the model has none of it, but {', '.join(single)}"
            )
        if bad := [name for name in names if not _is_single(policy, name, lora.targets)]:
            raise ValueError(
                f"lora.modules_to_save={ending}: {bad[0]} gets adapters, holds other modules or has stacked "
                "experts; name single modules (lm_head, embed_tokens), or train everything with lora=none"
            )
        found += names
    return found


def _is_single(policy: PreTrainedModel, name: str, targets: Sequence[str]) -> bool:
    module = policy.get_submodule(name)
    own = [f"{name}.{key}" for key, _ in module.named_parameters(recurse=False)]
    adapted = isinstance(module, nn.Linear) and name.rpartition(".")[2] in targets
    stacked = any(is_stacked(policy.config, full) for full in own)
    return bool(own) and not (adapted or stacked or any(module.children()))


def _second_names(policy: nn.Module, whole: Collection[int]) -> dict[str, str]:
    """Further name -> first name of the parameters in `whole` that the model holds twice (tied weights)."""
    first: dict[int, str] = {}
    again = {}
    for name, parameter in policy.named_parameters(remove_duplicate=False):
        if id(parameter) in whole and first.setdefault(id(parameter), name) != name:
            again[name] = first[id(parameter)]
    return again


def peft_config(adapter: Mapping[str, Any]) -> dict[str, Any]:
    """What of an adapter's config belongs into `adapter_config.json`.

    Files name experts one by one, and PEFT wants the names of their projections among the targets.
    """
    targets = set(adapter["target_modules"])
    if EXPERTS in targets:
        targets = targets - {EXPERTS} | set(PARTS)
    told = {key: value for key, value in adapter.items() if key != TIED}
    return told | {"target_modules": sorted(targets)}


def adapter_config(policy: nn.Module) -> dict[str, Any] | None:
    """PEFT's config of the adapters with `TIED` beside it, or None for a model without adapters."""
    return getattr(policy, "prl_adapter_config", None)


def adapters(policy: nn.Module) -> Iterator[Adapter]:
    """All adapted linear layers, in the order of the model."""
    for name, module in policy.named_modules():
        if hasattr(module, "base_layer") and hasattr(module, "lora_A"):
            a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
            yield Adapter(name, module.base_layer.weight, a, b, module.scaling["default"])


def merge(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """base + scaling B A, added in float32 (float64 for float64 weights), in the type of `base`."""
    precise = torch.promote_types(base.dtype, torch.float32)
    return torch.addmm(base.to(precise), b.to(precise), a.to(precise), alpha=scaling).to(base.dtype)


def merge_experts(weights: Mapping[str, Tensor], adapter: ExpertAdapter) -> dict[str, Tensor]:
    """`merge` of every projection in `weights`, by its name in files [out, in]."""
    matrices = adapter.matrices()
    found = {}
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        a, b = (matrices[f"{layer}.lora_{side}.weight"] for side in "AB")
        found[name] = merge(weight, a, b, adapter.scaling)
    return found


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
