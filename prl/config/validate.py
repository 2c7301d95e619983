"""Judges a composed tree against the schema: unknown keys, missing values, types, bounds; finds them all."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from prl.config import algo
from prl.config.choices import OPTIONAL_GROUPS
from prl.config.errors import NO_VALUE, Problem, nearest, suggest
from prl.config.fields import hints
from prl.config.schema import GROUPS

MISSING = "???"


class Bad(Exception):
    """The value at hand was refused; its problem is noted."""


@dataclass
class Validator:
    """One pass over a tree. `as_typed` holds the text of scalars as the user typed them, by path.

    `incomplete` tells that a mandatory value is absent or was refused: no config can be built.
    """

    as_typed: Mapping[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    incomplete: bool = False

    def node(self, schema: type, tree: dict[str, Any], path: str) -> dict[str, Any]:
        """`tree` with values of the schema's types; refused values are left out (their default stands in)."""
        types_of = hints(schema)
        fields = {entry.name: entry for entry in dataclasses.fields(schema)}
        for key in tree:
            if key not in fields:
                self._unknown(schema, tree, path, str(key))
        clean = {}
        for name, entry in fields.items():
            try:
                value = self._entry(entry, types_of[name], tree.get(name, MISSING), _join(path, name))
            except Bad:
                value = MISSING
            if value is not MISSING:
                clean[name] = value
            elif entry.default == MISSING:
                self.incomplete = True
        return clean

    def _entry(self, entry: dataclasses.Field[Any], hint: Any, value: Any, path: str) -> Any:
        if value is None and entry.metadata.get("replaced"):
            return MISSING
        if value == MISSING:
            if entry.default == MISSING:
                self._missing(entry, path)
            return MISSING
        if value is None and entry.metadata.get("doc") and hint in (str, int, float, bool):
            self._refuse(
                path, value, f"{_spoken(hint)} is needed", f"Set {path}=...: {entry.metadata['doc']}"
            )
        if hint is Any and entry.name in GROUPS:
            return self._choice(entry, value, path)
        value = self._value(hint, value, path)
        for number in value if isinstance(value, list) else [value]:
            self._bounds(entry.metadata, number, path)
        return value

    def _value(self, hint: Any, value: Any, path: str) -> Any:
        if hint is Any:
            return value
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            if value is None:
                return None
            hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
        if value is None:
            self._refuse(path, value, f"{_spoken(hint)} is needed")
        if dataclasses.is_dataclass(hint):
            return self._nested(typing.cast(type, hint), value, path)
        origin = typing.get_origin(hint)
        if origin is dict:
            return self._table(typing.get_args(hint)[1], self._expect(value, dict, hint, path), path)
        if origin is list:
            item = typing.get_args(hint)[0]
            entries = self._expect(value, list, hint, path)
            return [self._value(item, entry, f"{path}[{i}]") for i, entry in enumerate(entries)]
        return self._scalar(hint, value, path)

    def _nested(self, schema: type, value: Any, path: str) -> dict[str, Any]:
        self._expect(value, dict, schema, path)
        group = path.rpartition(".")[2]
        if group in GROUPS and issubclass(schema, tuple(GROUPS[group].values())):
            schema = GROUPS[group].get(value.get("name", ""), schema)
        return self.node(schema, value, path)

    def _table(self, hint: Any, value: dict[str, Any], path: str) -> dict[str, Any]:
        clean = {}
        for key, entry in value.items():
            try:
                clean[str(key)] = self._value(hint, entry, _join(path, str(key)))
            except Bad:
                continue
        return clean

    def _choice(self, entry: dataclasses.Field[Any], value: Any, path: str) -> Any:
        if value is None and entry.default is None:
            return None
        options = GROUPS[entry.name]
        if not isinstance(value, dict):
            reason = "an option of a group is chosen on the command line or in `defaults`, or is a table"
            self._refuse(path, value, reason, f"Write {path}=<option>; {_valid(options)}")
        name = value.get("name", MISSING)
        if name == MISSING or name is None:
            self._refuse(f"{path}.name", NO_VALUE, "missing", _valid(options).capitalize())
        if entry.name == "algo" and value.get("import_path"):
            if name in options and set(value) - _field_names(algo.AlgoConfig):
                reason = f"{path}={name} is prl's own"
                remedy = (
                    "Put name, import_path and kwargs into an option of your own: my_conf/algo/mine.yaml."
                )
                self._refuse(f"{path}.import_path", value["import_path"], reason, remedy)
            return self.node(algo.AlgoConfig, value, path)
        if name not in options:
            remedy = suggest(str(name), options)
            if entry.name == "algo":
                remedy += " An algorithm of your own also needs `import_path`."
            self._refuse(f"{path}.name", name, "no such option", remedy)
        return self.node(options[name], value, path)

    def _scalar(self, hint: Any, value: Any, path: str) -> Any:
        if hint is str and isinstance(value, bool | int | float) and path in self.as_typed:
            return self.as_typed[path]
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            remedy = f"""Quote it: "{path}='...'" """.strip() if hint is str else ""
            self._refuse(path, value, f"{_spoken(hint)} is needed, this is {_kind(value)}", remedy)
        if hint is float and not math.isfinite(value):
            self._refuse(path, value, "must be finite")
        return value

    def _bounds(self, metadata: Mapping[str, Any], value: Any, path: str) -> None:
        choices = metadata.get("choices")
        if choices and value is not None and value not in choices:
            listing = {str(choice) for choice in choices}
            self._refuse(path, value, "not one of the choices", suggest(str(value), listing))
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        for bound, words, holds in _BOUNDS:
            if bound in metadata and not holds(value, metadata[bound]):
                self._refuse(path, value, f"must be {words} {_number(metadata[bound])}", _range(metadata))

    def _expect(self, value: Any, kind: type, hint: Any, path: str) -> Any:
        if not isinstance(value, kind):
            self._refuse(path, value, f"{_spoken(hint)} is needed, this is {_kind(value)}")
        return value

    def _refuse(self, path: str, value: Any, reason: str, remedy: str = "") -> typing.NoReturn:
        self.problems.append(Problem(path, self.as_typed.get(path, value), reason, remedy))
        raise Bad

    def _missing(self, entry: dataclasses.Field[Any], path: str) -> None:
        doc = entry.metadata.get("doc", "")
        if entry.name in GROUPS:
            remedy = f"Choose one: {entry.name}=<option>; {_valid(GROUPS[entry.name])}"
        else:
            remedy = f"Set {path}=...: {doc}" if doc else f"Set {path}=..."
        self.problems.append(Problem(path, NO_VALUE, "missing", remedy))

    def _unknown(self, schema: type, tree: dict[str, Any], path: str, key: str) -> None:
        where = _join(path, key)
        value = self.as_typed.get(where, tree[key])
        reason = "unknown key" if path == "" else f"unknown key of {path}"
        if isinstance(tree.get("name"), str) and path.rpartition(".")[2] in GROUPS:
            reason = f"unknown key of {path}={tree['name']}"
        names = [entry.name for entry in dataclasses.fields(schema)]
        remedy = _where_else(path, key, names)
        if where in OPTIONAL_GROUPS:
            remedy = "The first line of the option's file must be `# @package _global_`."
        self.problems.append(Problem(where, value, reason, remedy))


_BOUNDS = (
    ("gt", "more than", lambda value, bound: value > bound),
    ("ge", "at least", lambda value, bound: value >= bound),
    ("lt", "less than", lambda value, bound: value < bound),
    ("le", "at most", lambda value, bound: value <= bound),
)


def _where_else(path: str, key: str, names: list[str]) -> str:
    """Remedy for an unknown key: its nearest sibling, or the place or option that does have it."""
    group = path.rpartition(".")[2]
    owners = [name for name, schema in GROUPS.get(group, {}).items() if key in _field_names(schema)]
    if owners:
        return f"It belongs to {', '.join(f'{group}={name}' for name in owners)}; valid: {', '.join(names)}."
    close = nearest(key, names)
    if close is None or path == "":
        elsewhere = sorted(
            (
                found
                for found in leaf_paths()
                if found.rpartition(".")[2] == key and found != _join(path, key)
            ),
            key=lambda found: found.count("."),
        )
        if elsewhere:
            return f"Nearest: {', '.join(elsewhere[:3])}."
    listing = f"valid: {', '.join(names)}."
    return f"Nearest: {_join(path, close)}; {listing}" if close else listing.capitalize()


def leaf_paths() -> Iterator[str]:
    """Dotted paths of the fields of every job and option (`optim.lr`, `rollout.sampling.top_p`)."""
    from prl.config.schema import JOBS

    seen: dict[str, None] = {}
    for job in JOBS.values():
        for path in _paths_of(job, ""):
            seen.setdefault(path)
    for group, options in GROUPS.items():
        for schema in options.values():
            for path in _paths_of(schema, group):
                seen.setdefault(path)
    yield from seen


def _paths_of(schema: type, path: str) -> Iterator[str]:
    for name, hint in hints(schema).items():
        for kind in (hint, *typing.get_args(hint)):
            if dataclasses.is_dataclass(kind):
                inner = f"{name}.<name>" if typing.get_origin(hint) is dict else name
                yield from _paths_of(typing.cast(type, kind), _join(path, inner))
                break
        else:
            yield _join(path, name)


def _field_names(schema: type) -> set[str]:
    return {entry.name for entry in dataclasses.fields(schema)}


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _valid(options: Mapping[str, Any]) -> str:
    return f"valid: {', '.join(options)}."


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(metadata: Mapping[str, Any]) -> str:
    """The whole range, where a value has more than the one bound that the reason names."""
    parts = [f"{words} {_number(metadata[bound])}" for bound, words, _ in _BOUNDS if bound in metadata]
    return f"Valid: {' and '.join(parts)}." if len(parts) > 1 else ""


def _kind(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, bool):
        return "true or false"
    names = {int: "an integer", float: "a number", str: "text", list: "a list", dict: "a table"}
    return "nothing" if value is None else names.get(type(value), type(value).__name__)


def _spoken(hint: Any) -> str:
    """What a type asks for, in words."""
    origin = typing.get_origin(hint)
    if origin is list:
        return f"a list [{_spoken(typing.get_args(hint)[0])}, ...]"
    if origin is dict or dataclasses.is_dataclass(hint):
        return "a table {key: value}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "text", Any: "a value"}
    return names.get(hint, str(hint))
