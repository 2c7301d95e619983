"""The catalogue of what can be chosen: groups with their options, and every field of the schema.

`--help` prints it; `python -m prl.config.reference` writes it as `conf/README.md`.
"""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from prl.config.fields import hints
from prl.config.options import headline, split_audience
from prl.config.schema import GROUPS, JOBS
from prl.config.store import conf_dir

HIDDEN = ("hydra", "recipe/rl", "recipe/eval")
"""Groups that no user chooses from."""


@dataclass(frozen=True)
class Option:
    """One file of a group; `chosen` when the command's primary config selects it."""

    name: str
    comment: str
    chosen: bool


@dataclass(frozen=True)
class Field:
    """One key, as a user sets it."""

    path: str
    kind: str
    default: str
    doc: str


def summary(command: str) -> str:
    """What a command does: the first line of its primary config."""
    return headline((conf_dir() / f"{command}.yaml").read_text())


def groups(command: str, config_dirs: Sequence[str | Path] = ()) -> dict[str, list[Option]]:
    """Groups of `command` in the order of its defaults list, each with its options."""
    chosen = _defaults(command)
    directories = [conf_dir(), *map(Path, config_dirs)]
    listed = {
        group: list(_options(command, group, names, directories))
        for group, names in chosen.items()
        if group not in HIDDEN
    }
    return {group: options for group, options in listed.items() if options}


def _defaults(command: str) -> dict[str, list[str]]:
    """Group -> names of the options in the primary config's defaults list."""
    listed = yaml.safe_load((conf_dir() / f"{command}.yaml").read_text())["defaults"]
    chosen: dict[str, list[str]] = {}
    for entry in listed:
        if isinstance(entry, dict):
            ((group, value),) = entry.items()
            names = value if isinstance(value, list) else [value]
            chosen[group.removeprefix("optional ")] = [str(name) for name in names if name is not None]
    return chosen


def _options(command: str, group: str, chosen: list[str], directories: list[Path]) -> Iterator[Option]:
    for directory in directories:
        for path in sorted((directory / group).glob("*.yaml")):
            audience, comment = split_audience(headline(path.read_text()))
            if audience in (None, command):
                yield Option(path.stem, comment[:1].upper() + comment[1:], path.stem in chosen)


def fields(command: str) -> Iterator[Field]:
    """Every key of `command` outside the groups whose option decides about the keys."""
    yield from _fields(JOBS[command], "")


def option_fields(group: str) -> dict[str, list[Field]]:
    """Option -> its keys. The keys that all options share come first, under the name ""."""
    found = {name: list(_fields(schema, group)) for name, schema in GROUPS[group].items()}
    shared = [entry for entry in next(iter(found.values())) if all(entry in keys for keys in found.values())]
    own = {name: [entry for entry in keys if entry not in shared] for name, keys in found.items()}
    return {"": shared, **{name: keys for name, keys in own.items() if keys}}


def _fields(schema: type, path: str) -> Iterator[Field]:
    types_of = hints(schema)
    for entry in dataclasses.fields(schema):
        where, hint = f"{path}.{entry.name}" if path else entry.name, types_of[entry.name]
        if (path == "" and entry.name in GROUPS) or (entry.name == "name" and path in GROUPS):
            continue
        nested = _nested(hint)
        if nested is None:
            yield Field(where, _kind(hint, entry.metadata), _default(entry), entry.metadata.get("doc", ""))
            continue
        if type(None) in typing.get_args(hint) or typing.get_origin(hint) is dict:
            yield Field(where, "table", _default(entry), entry.metadata.get("doc", ""))
        yield from _fields(nested, f"{where}.<name>" if typing.get_origin(hint) is dict else where)


def _nested(hint: Any) -> type | None:
    """The dataclass that a field holds, directly, optionally, or as the values of a table."""
    for kind in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(kind):
            return typing.cast(type, kind)
    return None


def _kind(hint: Any, metadata: Any) -> str:
    if "choices" in metadata:
        return " | ".join(str(choice) for choice in metadata["choices"])
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    bounds = "".join(f" {sign} {metadata[key]:g}" for key, sign in signs.items() if key in metadata)
    names = {bool: "bool", int: "int", float: "number", str: "text", Any: "any", type(None): "null"}
    if typing.get_origin(hint) in (list, dict):
        inner = ", ".join(names.get(arg, "any") for arg in typing.get_args(hint))
        return f"{'list' if typing.get_origin(hint) is list else 'table'}[{inner}]{bounds}"
    parts = [names.get(arg, str(arg)) for arg in (typing.get_args(hint) or (hint,))]
    return f"{parts[0]}{bounds}" + "".join(f" | {part}" for part in parts[1:])


def _default(entry: dataclasses.Field[Any]) -> str:
    if entry.default_factory is not dataclasses.MISSING:
        value = entry.default_factory()
        value = {} if isinstance(value, dict) and not value else value
        plain = [v for v in value.values() if dataclasses.is_dataclass(v)] if isinstance(value, dict) else []
        return "{" + ", ".join(value) + "}" if plain else _plain(value)
    return "required" if entry.default == "???" else _plain(entry.default)


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:g}"
    return str(value).replace("\n", "⏎")


def help_text(command: str, commands: Sequence[str], config_dirs: Sequence[str | Path] = ()) -> str:
    """What `prl command --help` prints."""
    lines = [f"prl {command}: {summary(command)}", "", "Usage: python -m prl [command] [flags] key=value ..."]
    lines += ["", "Commands"]
    lines += [f"  {name:10}{summary(name)}" for name in commands]
    lines += ["", "Flags", *(EVAL_FLAGS if command == "eval" else []), *FLAGS]
    lines += ["", "Groups: choose by group=option (* = chosen unless you say otherwise)"]
    for group, options in groups(command, config_dirs).items():
        lines += ["", f"  {group}"]
        lines += [
            f"  {'*' if option.chosen else ' '} {option.name:20} {option.comment}" for option in options
        ]
        for name, keys in option_fields(group).items() if group in GROUPS else ():
            lines += [f"    keys of {group}={name}" if name else f"    keys of {group}"] * bool(keys)
            lines += [_line(entry, "      ") for entry in keys]
    lines += ["", "Keys: key = default of the schema (type) meaning; `--cfg job` shows what a run gets", ""]
    lines += [_line(entry, "  ") for entry in fields(command)]
    return "\n".join(lines)


EVAL_FLAGS = [
    "  NAME ...               environments or tasksets; `prl eval compare A B` compares two evaluations",
    "  -n N, -r N, -c N       tasks, rollouts per task, rollouts in flight; -s shuffles the tasks",
    "  -m MODEL               an option of model/, a directory, a run, or a name at the endpoint",
    "  --resume               go on with run.name; --any.key V is the same as any.key=V",
]
"""The short form of `prl eval`, in which -c and -m are not Hydra's."""

FLAGS = [
    "  --dry-run              print what would run, start nothing, write nothing",
    "  --multirun, -m         sweep over every value of key=a,b",
    "  --cfg job [--resolve]  print the composed configuration",
    "  --info [defaults]      print where each choice comes from",
    "  --config-dir DIR       add your own groups and options; --config-name NAME your own primary config",
    "  --hydra-help           Hydra's own flags; --version prl's version",
]


def _line(entry: Field, indent: str) -> str:
    return f"{indent}{entry.path} = {entry.default}  ({entry.kind})  {entry.doc}".rstrip()


def markdown() -> str:
    """The whole catalogue as a page."""
    lines = ["# What can be chosen", "", *PREFACE]
    seen: set[str] = set()
    for command in JOBS:
        lines += ["", f"## prl {command}", "", summary(command)]
        for group, options in groups(command).items():
            lines += ["", f"### {group}" + (" (keys as above)" if group in seen else ""), ""]
            lines += ["| option | when |", "|---|---|"]
            lines += [
                f"| `{o.name}`{' (default)' if o.chosen else ''} | {_cell(o.comment)} |" for o in options
            ]
            if group in GROUPS and group not in seen:
                lines += _table(_owners(group), "option")
            seen.add(group)
        lines += ["", f"### keys of prl {command}", *_table(dict.fromkeys(fields(command), ""), "")]
    return "\n".join(lines) + "\n"


PREFACE = [
    "Made by `python -m prl.config.reference`; the schema in `prl/config/` and the first line of each",
    "option file are its source. Defaults are those of the schema; `python -m prl --cfg job` shows what a",
    "run gets from its options.",
]


def _owners(group: str) -> dict[Field, str]:
    """Key -> names of the options that have it; "all" for those that every option has."""
    found: dict[Field, list[str]] = {}
    for name, keys in option_fields(group).items():
        for entry in keys:
            found.setdefault(entry, []).append(name or "all")
    return {entry: ", ".join(names) for entry, names in found.items()}


def _table(entries: dict[Field, str], extra: str) -> list[str]:
    """Keys as a table, with one more column when `extra` names it."""
    if not entries:
        return []
    last = [f" {extra} |", "---|"] if extra else ["", ""]
    lines = ["", f"| key | type | default | meaning |{last[0]}", f"|---|---|---|---|{last[1]}"]
    for entry, owner in entries.items():
        cells = f"| `{entry.path}` | {_cell(entry.kind)} | `{_cell(entry.default)}` | {_cell(entry.doc)} |"
        lines.append(cells + (f" {owner} |" if extra else ""))
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(markdown())
