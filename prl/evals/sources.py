"""What each environment of an evaluation gets: its own options over the shared ones, key by key."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from prl.config.schema import EvalConfig
from prl.config.sources import EnvConfig, SamplingConfig, SelectConfig, TaskMatchConfig


@dataclass(frozen=True, order=True)
class Key:
    """One rollout that was asked for. `step` is that of the checkpoint, 0 without checkpoints."""

    step: int
    env: str
    task: str
    rollout: int


def merge_envs(config: EvalConfig) -> None:
    """Write into each `env.<name>`, in place, what it inherits: select, sampling, group size, options."""
    config.env = {name: _merged_env(config, env) for name, env in config.env.items()}


def _merged_env(config: EvalConfig, own: EnvConfig) -> EnvConfig:
    return dataclasses.replace(
        own,
        taskset=_merged(config.shared.taskset, own.taskset),
        agents=_merged(config.shared.agents, own.agents),
        select=merged_select(config.select, own.select),
        group_size=own.group_size or config.rollout.group_size,
        sampling=merged_sampling(config.rollout.sampling, own.sampling),
    )


def merged_sampling(shared: SamplingConfig, own: SamplingConfig) -> SamplingConfig:
    """Own values win; `extra_body` by each of its keys."""
    extra = _merged(shared.extra_body, own.extra_body)
    return dataclasses.replace(_first(SamplingConfig, own, shared), extra_body=extra)


def merged_select(shared: SelectConfig, own: SelectConfig) -> SelectConfig:
    """Own values win; `include` and `exclude` by each of their lists."""
    return dataclasses.replace(
        _first(SelectConfig, own, shared),
        include=_lists(own.include, shared.include),
        exclude=_lists(own.exclude, shared.exclude),
    )


def sampling_values(config: SamplingConfig) -> dict[str, Any]:
    """What is sent to the engine; a null field is left to it."""
    typed = {name: value for name, value in vars(config).items() if value is not None}
    return {**typed.pop("extra_body"), **typed}


def _first(schema: type, own: Any, shared: Any) -> Any:
    names = [entry.name for entry in dataclasses.fields(schema)]
    values = {name: getattr(own, name) for name in names}
    return schema(**{n: getattr(shared, n) if value is None else value for n, value in values.items()})


def _lists(own: TaskMatchConfig, shared: TaskMatchConfig) -> TaskMatchConfig:
    return TaskMatchConfig(**{name: value or getattr(shared, name) for name, value in vars(own).items()})


def _merged(shared: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    merged = dict(shared)
    for key, value in own.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
