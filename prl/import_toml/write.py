"""A translation as an option of the `experiment` group."""

from __future__ import annotations

from typing import Any

import yaml

from prl.import_toml.translation import Translation


def overlay(notes: Translation, source: str) -> str:
    """YAML text: `@package _global_`, the choices as a defaults list, then the values as a tree."""
    lines = [
        "# @package _global_",
        f"# {notes.command}: choose for what {source} describes.",
        "defaults:",
        *(f"  - {_choice(*choice)}" for choice in sorted(notes.choices.items(), key=_order)),
    ]
    if notes.environments:
        lines.append("  - override /env: []")
    tree: dict[str, Any] = {}
    for key, value in notes.values.items():
        _plant(tree, key.split("."), value)
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True, width=110)
    return "\n".join(lines) + "\n" + body


def _is_new(group: str) -> bool:
    """An environment's own algorithm is no choice of the run, so there is none to override."""
    return "@env." in group or "@eval.env." in group


def _order(choice: tuple[str, str]) -> bool:
    """Hydra wants the overrides at the end of the list."""
    return not _is_new(choice[0])


def _choice(group: str, option: str) -> str:
    name = f'"{option}"' if option.isdigit() else option
    return f"/{group}: {name}" if _is_new(group) else f"override /{group}: {name}"


def _plant(tree: dict[str, Any], path: list[str], value: Any) -> None:
    *tables, last = path
    for key in tables:
        tree = tree.setdefault(key, {})
    if isinstance(value, dict) and isinstance(tree.get(last), dict):
        tree[last] |= value
    else:
        tree[last] = value
