"""What others get of a model's weights: whole tensors under the names that Hugging Face files use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor, nn

from prl.checkpoint.experts import split_experts
from prl.trainer.expert_lora import expert_adapters
from prl.trainer.lora import adapters, is_low_rank, merge, merge_experts, peft_names


class Published(NamedTuple):
    """Parameters that must be whole at the same time, and the named tensors that are made of them."""

    parameters: list[nn.Parameter]
    tensors: Callable[[], dict[str, Tensor]]

    @property
    def elements(self) -> int:
        return sum(getattr(p, "ds_numel", p.numel()) for p in self.parameters)


def merged_weights(policy: nn.Module) -> Iterator[Published]:
    """Every weight once, tied ones included; adapters are added to their layers, experts come one by one."""
    adapted = {id(adapter.base): adapter for adapter in adapters(policy)}
    experts = {id(adapter.base): adapter for adapter in expert_adapters(policy)}
    for name, parameter in policy.named_parameters():
        if is_low_rank(name):
            continue
        if found := adapted.get(id(parameter)):
            parts = [found.base, found.a, found.b]
            yield Published(
                parts,
                lambda found=found: {f"{found.name}.weight": merge(*_values(found[1:4]), found.scaling)},
            )
        elif stack := experts.get(id(parameter)):
            yield Published(
                [stack.base, *stack.stacks.values()],
                lambda s=stack: merge_experts(split_experts(policy.config, s.name, s.base.detach()), s),
            )
        else:
            plain = name.replace(".base_layer.", ".")
            yield Published(
                [parameter], lambda n=plain, p=parameter: split_experts(policy.config, n, p.detach())
            )


def adapter_weights(policy: nn.Module) -> Iterator[Published]:
    """A and B of every adapted layer under PEFT's names.

    Raises ValueError for a model whose experts have adapters: no engine takes those in place.
    """
    if any(expert_adapters(policy)):
        raise ValueError(
            "lora.publish=adapter: engines take no adapters of experts; set lora.publish=merged, "
            "or leave experts out of lora.targets"
        )
    for adapter in adapters(policy):
        named = peft_names(adapter)
        yield Published(list(named.values()), lambda named=named: {k: p.detach() for k, p in named.items()})


def buckets(published: Iterator[Published], elements: int) -> Iterator[list[Published]]:
    """Runs of entries with at most `elements` parameter elements together, or a single larger entry."""
    run: list[Published] = []
    used = 0
    for entry in published:
        if run and used + entry.elements > elements:
            yield run
            run, used = [], 0
        run.append(entry)
        used += entry.elements
    yield run


def _values(parameters: tuple[nn.Parameter, ...]) -> list[Tensor]:
    return [p.detach() for p in parameters]
