"""Reads `key=value` words as Hydra does, finds every unreadable or unknown choice, and settles the rest.

Hydra stops at the first mistake and lets numbers swallow text (`run.name=2024_01_01` becomes 20240101).
Here every word is judged alone; `prl.config.composition` then sets one key after the other, unknown ones too:
`prl.config.validate` names them all.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config.choices import OPTIONAL_GROUPS, ignored_by_prl, misplaced, unfit_list
from prl.config.errors import NO_VALUE, Problem, nearest, shell_word, suggest
from prl.config.options import audience
from prl.config.schema import GROUPS

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.override_parser.types import Override

EVAL_CHOICE = re.compile(r"\+{0,2}eval\.env=(?!null$)\[?([\w\s,-]*)\]?")

ENV_CHOICE = re.compile(r"\+{0,2}env\.([\w-]+)\.(algo|curriculum)=([\w,-]+)")

SWEPT = "hydra.sweeper.params"
SWEPT_REMEDY = "Write the values as words (seed=1,2), or put the table into an option of `sweep/`."

SEVERAL_WORDS = re.compile(r"[\s;]+[\w.@+~/]+=")
"""Another `key=value` within a value: words that were quoted as one."""


@dataclass
class Settled:
    """Overrides as Hydra takes them, the text of scalars as typed, and what was wrong.

    `choices` are the words that choose options, in a sweep `first_choices` those of its first element;
    `values` set or remove keys.
    """

    choices: list[str] = field(default_factory=list)
    first_choices: list[str] = field(default_factory=list)
    values: list[Override] = field(default_factory=list)
    as_typed: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    bad_groups: set[str] = field(default_factory=set)
    needs_force: set[int] = field(default_factory=set)

    def choose(self, line: str, first: str | None = None) -> None:
        self.choices.append(line)
        self.first_choices.append(line if first is None else first)

    def note(self, override: Override, as_it_stands: bool) -> None:
        """Remember a word that Hydra would only take with `++`."""
        if not as_it_stands:
            self.needs_force.add(id(override))

    @property
    def lines(self) -> list[str]:
        """All words, such as Hydra's application takes them: as typed where it does."""
        return [*self.choices, *map(self._word, self.values)]

    def _word(self, override: Override) -> str:
        word = override.input_line or ""
        return "++" + word.lstrip("+") if id(override) in self.needs_force else word


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
        for word in [part for typed in words for part in self._spelled_out(typed)]:
            try:
                (override,) = self.parser.parse_overrides([word])  # a glob needs what this adds to it
            except HydraException as error:
                settled.problems.append(self._unreadable(word, str(error)))
                continue
            if override.key_or_group == SWEPT and isinstance(override._value, dict):
                settled.problems.append(
                    Problem(SWEPT, NO_VALUE, "Hydra takes it from a file only", SWEPT_REMEDY)
                )
            elif override.is_hydra_override():
                fault = ignored_by_prl(override.key_or_group, word.partition("=")[2])
                settled.problems.append(fault) if fault else settled.choose(word)
            elif override.is_sweep_override() and not sweeps:
                settled.problems.append(_several_values(override))
            elif (
                override.key_or_group
                and not isinstance(override._value, dict)
                and self.options(override.key_or_group)
            ):
                self._settle_choice(override, settled)
            else:
                self._settle_value(override, settled)
        return settled

    def _spelled_out(self, word: str) -> list[str]:
        """`env.a.algo=opd` as Hydra's choice of an option for a place: `+algo@env.a.algo=opd`."""
        match = ENV_CHOICE.fullmatch(word)
        if match and match[3] != "null":
            return [f"+{match[2]}@env.{match[1]}.{match[2]}={match[3]}"]
        return self._chosen_to_evaluate(word)

    def _chosen_to_evaluate(self, word: str) -> list[str]:
        """`eval.env=[a,b]` as Hydra's choices: the options of `env` fill `eval.env.a` and `eval.env.b`."""
        match = EVAL_CHOICE.fullmatch(word)
        if match is None or not self.options("env"):
            return [word]
        names = [name.strip() for name in match[1].split(",") if name.strip()]
        if len(set(names)) < len(names):
            return [word]
        return [f"+env@eval.env.{name}={name}" for name in names]

    def _settle_value(self, override: Override, settled: Settled) -> None:
        key, word = override.key_or_group, override.input_line or ""
        if (fault := self._not_a_value(override)) is not None:
            settled.problems.append(fault)
            return
        if override.package is not None:
            groups = set(self.loader.list_groups("")) - {"hydra", "schema", "recipe"}
            settled.problems.append(Problem(key, NO_VALUE, "no such group", suggest(key, groups)))
            return
        if override.is_delete() and _is_schema_key(key):
            reason = "every run has this key, so it cannot be removed"
            settled.problems.append(Problem(key, NO_VALUE, reason, f"Set it: {key}=..., or {key}=null."))
            return
        settled.as_typed.pop(key, None)
        settled.values.append(override)
        if isinstance(override.value(), bool | int | float):
            settled.as_typed[key] = word.split("=", 1)[1].strip()

    def _not_a_value(self, override: Override) -> Problem | None:
        """A key whose value only a choice can change."""
        key, value = override.key_or_group, override.value()
        group, _, last = key.rpartition(".")
        if not key:
            return Problem(override.input_line or "", NO_VALUE, "a key is needed before `=`")
        if last == "name" and isinstance(value, str) and group in GROUPS and value in self.options(group):
            return Problem(key, value, "an option is chosen as a whole", f"Write {group}={value}.")
        if key == "eval.env" and isinstance(value, list):
            return unfit_list("eval.env", [str(name) for name in value])
        return None

    def _settle_choice(self, override: Override, settled: Settled) -> None:
        group = override.key_or_group
        if (fault := misplaced(self.command, override)) is not None:
            settled.problems.append(fault)
            return
        if override.is_delete() and group == "env":
            settled.problems.append(_no_choice(group, self.options(group)))
            return
        if override.is_delete():
            settled.choose(override.input_line or "")
            return
        if override.value() is None:
            if group not in OPTIONAL_GROUPS:
                settled.problems.append(_no_choice(group, self.options(group)))
            return
        if override.value_type is not None and "GLOB" in override.value_type.name:
            first = next(iter(_values(override)), None)
            settled.choose(
                override.input_line or "", None if first is None else f"{_target(override)}={first}"
            )
            return
        texts = [self._names(group, value, settled) for value in _values(override)]
        kept = [text for text in texts if text]
        if kept:
            plus = "+" if override.is_add() and group not in OPTIONAL_GROUPS else ""
            target = f"{plus}{_target(override)}="
            settled.choose(target + ",".join(kept), target + kept[0])

    def _names(self, group: str, value: Any, settled: Settled) -> str:
        """One choice in Hydra's grammar: a name or a list of names (`zero=1` chooses the name "1")."""
        several = isinstance(value, list)
        if several and (fault := unfit_list(group, [_text(name) for name in value])) is not None:
            settled.problems.append(fault)
            return ""
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
        if SEVERAL_WORDS.search(value):
            reason = "several words in one"
            return Problem(word, NO_VALUE, reason, f"Write {' '.join(re.split(r'[ ;]+', word))}.")
        word_quoted = f"{key}={quoted(value)}"
        try:
            readable = self.parser.parse_override(word_quoted).value() == value
        except HydraException:
            readable = False
        if readable:
            return Problem(key, value, "Hydra cannot read this unquoted", f"Write {shell_word(word_quoted)}.")
        return Problem(word, NO_VALUE, message.splitlines()[0], "A key is letters, digits, `_`, `.` and `/`.")


def _is_schema_key(key: str) -> bool:
    """Whether a schema has `key`, so that its default would silently take the place of a removed value."""
    from prl.config.validate import leaf_paths

    parts = key.split(".")
    if parts[0] == "env" and len(parts) > 2:
        parts[1] = "<name>"
    return ".".join(parts) in leaf_paths()


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
