"""Reads `key=value` words as Hydra does, finds every unreadable or unknown choice, and settles the rest.

Hydra stops at the first mistake and lets numbers swallow text (`run.name=2024_01_01` becomes 20240101).
Here every word is judged alone; values go on as `++key=value`, so that composition never stops at an
unknown key: `prl.config.validate` then names them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.errors import NO_VALUE, Problem, nearest, shell_word, suggest
from prl.config.options import audience

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.override_parser.types import Override

OPTIONAL_GROUPS = ("experiment", "debug")
"""Groups of which a run may have none."""


@dataclass
class Settled:
    """Overrides as Hydra takes them, the text of scalars as typed, and what was wrong.

    `changed` are the keys that the user took for existing ones (set without `+`), with their line.
    """

    lines: list[str] = field(default_factory=list)
    as_typed: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_groups: set[str] = field(default_factory=set)
    changed: dict[str, str] = field(default_factory=dict)


class OverrideReader:
    """Judges the overrides of one command against the options on the search path."""

    def __init__(
        self, command: str, loader: ConfigLoaderImpl, config_name: str, words: Sequence[str]
    ) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self.command = command
        self.loader = loader
        self.parser = OverridesParser.create(config_loader=loader)
        self.repository: IConfigRepository = loader.repository
        searchpath = [word for word in words if word.startswith("hydra.searchpath=")]
        if searchpath or config_name != command:
            _, self.repository = loader._parse_overrides_and_create_caching_repo(config_name, searchpath)

    def options(self, group: str) -> list[str]:
        """Names of a group's options; empty when there is no such group."""
        from hydra.core.object_type import ObjectType

        return self.repository.get_group_options(group, ObjectType.CONFIG)

    def directories(self) -> list[Path]:
        """Where option files are looked for, as far as that is on disk."""
        return [Path(source.path) for source in self.repository.get_sources() if source.scheme() == "file"]

    def settle(self, words: Sequence[str], sweeps: bool = False) -> Settled:
        """Judge `words`; with `sweeps`, several values per key are allowed and kept."""
        from hydra.errors import HydraException

        settled = Settled()
        for word in words:
            try:
                override = self.parser.parse_override(word)
            except HydraException as error:
                settled.problems.append(self._unreadable(word, str(error)))
                continue
            if override.is_hydra_override():
                settled.lines.append(word)
            elif override.is_sweep_override() and not sweeps:
                settled.problems.append(_several_values(override))
            elif not isinstance(override._value, dict) and self.options(override.key_or_group):
                self._settle_choice(override, settled)
            else:
                self._settle_value(override, settled)
        return settled

    def _settle_value(self, override: Override, settled: Settled) -> None:
        key, word = override.key_or_group, override.input_line or ""
        if override.package is not None:
            groups = set(self.loader.list_groups("")) - {"hydra", "schema", "recipe"}
            settled.problems.append(Problem(key, NO_VALUE, "no such group", suggest(key, groups)))
            return
        settled.as_typed.pop(key, None)
        if override.is_delete():
            settled.lines.append(word)
            return
        settled.lines.append("++" + word.lstrip("+"))
        if not override.is_add() and not override.is_force_add():
            settled.changed[key] = settled.lines[-1]
        if isinstance(override.value(), bool | int | float):
            settled.as_typed[key] = word.split("=", 1)[1].strip()

    def _settle_choice(self, override: Override, settled: Settled) -> None:
        group = override.key_or_group
        if override.is_delete():
            settled.lines.append(override.input_line or "")
            return
        if override.value() is None:
            if group not in OPTIONAL_GROUPS:
                settled.problems.append(_no_choice(group, self.options(group)))
            return
        if override.value_type is not None and "GLOB" in override.value_type.name:
            settled.lines.append(override.input_line or "")
            return
        texts = [self._names(group, value, settled) for value in _values(override)]
        kept = [text for text in texts if text]
        if kept:
            plus = "+" if override.is_add() and group not in OPTIONAL_GROUPS else ""
            settled.lines.append(f"{plus}{_target(override)}={','.join(kept)}")

    def _names(self, group: str, value: Any, settled: Settled) -> str:
        """One choice in Hydra's grammar: a name or a list of names (`zero=1` chooses the name "1")."""
        several = isinstance(value, list)
        names = [self._option(group, _text(name), settled) for name in (value if several else [value])]
        text = ",".join(_plain(name) for name in names if name is not None)
        return f"[{text}]" if several else text

    def _option(self, group: str, name: str, settled: Settled) -> str | None:
        """`name`, or the option to go on with (the nearest) after noting that there is no such option."""
        options = self.options(group)
        if name not in options:
            settled.problems.append(Problem(group, name, "no such option", suggest(name, options)))
            settled.bad_groups.add(group)
            return nearest(name, options)
        wanted = audience(self.directories(), group, name) if group in OPTIONAL_GROUPS else None
        if wanted not in (None, self.command):
            reason = f"made for `prl {wanted}`, not for `prl {self.command}`"
            settled.problems.append(Problem(group, name, reason))
            return None
        return name

    def _unreadable(self, word: str, message: str) -> Problem:
        """A word that Hydra's grammar refuses, with the quoting that it accepts."""
        from hydra.errors import HydraException

        if "=" not in word:
            return Problem(word, NO_VALUE, "not of the form key=value")
        key, value = word.split("=", 1)
        word_quoted = f"{key}={quoted(value)}"
        try:
            readable = self.parser.parse_override(word_quoted).value() == value
        except HydraException:
            readable = False
        if readable:
            return Problem(key, value, "Hydra cannot read this unquoted", f"Write {shell_word(word_quoted)}.")
        return Problem(word, NO_VALUE, message.splitlines()[0], "A key is letters, digits, `_`, `.` and `/`.")


def _values(override: Override) -> list[Any]:
    """What an override chooses; more than one in a sweep."""
    return list(override.sweep_iterator()) if override.is_sweep_override() else [override.value()]


def _text(value: Any) -> str:
    """A name as typed; Hydra wraps a quoted one."""
    return str(getattr(value, "text", value))


def _target(override: Override) -> str:
    package = f"@{override.package}" if override.package else ""
    return f"{override.key_or_group}{package}"


def quoted(text: str) -> str:
    """`text` as a quoted string of Hydra's grammar."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return QuotedString(text=text, quote=Quote.single).with_quotes()


def _plain(name: str) -> str:
    """`name` for Hydra's grammar, quoted where it would not be read as text."""
    return name if name.isidentifier() and name.lower() not in ("null", "true", "false") else quoted(name)


def _no_choice(group: str, options: list[str]) -> Problem:
    if group == "env":
        return Problem(group, None, "a list of environments is needed", suggest("", options))
    return Problem(group, None, "a choice is needed", suggest("none", options))


def _several_values(override: Override) -> Problem:
    key, value = override.key_or_group, (override.input_line or "").split("=", 1)[1]
    as_list, as_text = shell_word(f"{key}=[{value}]"), shell_word(f"{key}={quoted(value)}")
    remedy = f"Add --multirun to sweep, write {as_list} for a list, {as_text} for text."
    return Problem(key, value, "several values", remedy)
