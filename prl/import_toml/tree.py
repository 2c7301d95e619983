"""A parsed TOML file that is taken apart key by key, so that nothing in it can be overlooked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ABSENT = object()
NULL = "None"
"""How the format spells null, which TOML has not."""


class Tree:
    """Nested tables. What `take` returned is gone; `leaves` are what nobody asked for."""

    def __init__(self, table: Mapping[str, Any], path: str = "") -> None:
        self.table = {key: _copied(value) for key, value in table.items()}
        self.path = path

    def take(self, key: str, default: Any = ABSENT) -> Any:
        """Remove and return the value at a dotted key; `default` (ABSENT) when there is none."""
        parts = key.split(".")
        tables = [self.table]
        for part in parts[:-1]:
            inner = tables[-1].get(part)
            if not isinstance(inner, dict):
                return default
            tables.append(inner)
        value = tables[-1].pop(parts[-1], default)
        for part, outer, inner in reversed(list(zip(parts[:-1], tables, tables[1:], strict=False))):
            if not inner:
                del outer[part]
        return value

    def branch(self, key: str) -> Tree:
        """The table at `key` as a tree of its own, taken out of this one; empty when there is none."""
        value = self.take(key, {})
        return Tree(value if isinstance(value, dict) else {"": value}, self.full(key))

    def has(self, key: str) -> bool:
        """Whether there is something at a dotted key, be it an empty table."""
        found: Any = self.table
        for part in key.split("."):
            if not isinstance(found, dict) or part not in found:
                return False
            found = found[part]
        return True

    def full(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self.path}.{key}" if self.path else key

    def leaves(self) -> Iterator[tuple[str, Any]]:
        """(full dotted key, value) of everything left; a list of tables is one value."""
        yield from _leaves(self.table, self.path)


SECTIONS = frozenset(
    (
        "ckpt",
        "slurm",
        "lora",
        "resume",
        "heartbeat",
        "metrics_server",
        "wandb",
        "file",
        "prime",
        "eval",
        "val",
        "inference",
        "curriculum",
        "router",
        "kv_cache_offload",
        "length_penalty",
        "vlm",
        "filter",
        "tokenizer",
        "chat_template",
        "client",
        "tags",
        "revision",
    )
)
"""Keys that the format lets a file disable; in prl leaving them out says the same."""


def without_disabled(table: Mapping[str, Any]) -> dict[str, Any]:
    """`table` without optional sections that are null."""
    kept = {key: value for key, value in table.items() if not (value == NULL and key in SECTIONS)}
    return {key: without_disabled(value) if isinstance(value, dict) else value for key, value in kept.items()}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Tables merged key by key, all else as in `second`: later files win."""
    result = dict(first)
    for key, value in second.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_copied(entry) for entry in value]
    return None if value == NULL else value


def _leaves(table: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        where = f"{path}.{key}" if path and key else path or key
        if isinstance(value, dict) and value:
            yield from _leaves(value, where)
        else:
            yield where, value
