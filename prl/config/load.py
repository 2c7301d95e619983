"""Plain trees to typed configs and back. A child process starts from `load_resolved`."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

import yaml

from prl.config import algo
from prl.config.fields import hints
from prl.config.schema import GROUPS, JOBS

T = TypeVar("T")


def load_resolved(path: Path) -> tuple[str, Any]:
    """(command, typed config) of a `resolved.yaml` that `dump_resolved` wrote."""
    tree = yaml.safe_load(path.read_text())
    command = tree.pop("command")
    return command, build(JOBS[command], tree)


def dump_resolved(command: str, config: Any) -> str:
    """YAML text of a typed config; `load_resolved` gives it back."""
    tree = {"command": command, **dataclasses.asdict(config)}
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times faster where PyYAML has libyaml
    return str(yaml.dump(tree, Dumper=dumper, sort_keys=False, allow_unicode=True))


def build(schema: type[T], tree: dict[str, Any]) -> T:
    """A typed config from a tree that was already checked. Raises TypeError on an unknown key."""
    types_of = hints(typing.cast(Any, schema))
    return schema(**{key: _value(key, types_of.get(key, Any), value) for key, value in tree.items()})


def group_schema(group: str, node: dict[str, Any]) -> type:
    """Dataclass of a group's node. An algorithm that prl does not ship has the plain `AlgoConfig`."""
    if group == "algo" and node.get("import_path"):
        return algo.AlgoConfig
    return GROUPS[group][node["name"]]


def _value(key: str, hint: Any, value: Any) -> Any:
    if value is None or not isinstance(value, dict):
        return value
    if hint is Any:
        return build(group_schema(key, value), value) if key in GROUPS else value
    if typing.get_origin(hint) is dict:
        item = typing.get_args(hint)[1]
        return {name: _value(name, item, entry) for name, entry in value.items()}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if not dataclasses.is_dataclass(hint):
        return value
    schema = group_schema(key, value) if key in GROUPS and "name" in value else hint
    return build(typing.cast(type, schema), value)
