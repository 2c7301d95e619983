"""What came of a TOML file: choices and values of prl, keys without counterpart, and faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prl.config.errors import NO_VALUE, Problem, suggest
from prl.import_toml.tree import ABSENT, Tree

Rule = str | tuple[str, Callable[[Any], Any]]
"""The prl key that a TOML key becomes, perhaps through a conversion."""


@dataclass
class Translation:
    """Collected while a tree is taken apart. `choices`: group -> option; `values`: prl key -> value.

    `without`: key -> why prl has no counterpart; `unsaid`: key that the file leaves out -> what prl does
    where the format's default cannot be had.
    """

    command: str
    choices: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    environments: list[str] = field(default_factory=list)
    became: dict[str, str] = field(default_factory=dict)
    without: dict[str, str] = field(default_factory=dict)
    unsaid: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    _origins: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: Any, origin: str) -> None:
        """Set a prl key. Two TOML keys may both become it, if they agree."""
        if key in self._origins and self.values[key] != value:
            reason = f"{self._origins[key]} says {self.values[key]}; both become {key} in prl"
            self.problems.append(Problem(origin, value, reason, "State it once."))
            return
        self.values[key] = value
        self._origins.setdefault(key, origin)
        self.became[origin] = key

    def default(self, key: str, value: Any) -> None:
        """What the format means where it is silent, if nothing was said."""
        self.values.setdefault(key, value)

    def choose(self, group: str, option: str, origin: str) -> None:
        """Choose an option; an origin "" is the meaning of silence."""
        if origin and self.choices.get(group, option) != option and f"{group}=" in self._origins:
            reason = f"{self._origins[f'{group}=']} chose {self.choices[group]}"
            self.problems.append(Problem(origin, option, reason, "State it once."))
            return
        self.choices[group] = option
        if origin:
            self._origins[f"{group}="] = origin
            self.became[origin] = f"{group}={option}"

    def move(self, tree: Tree, rules: Mapping[str, Rule]) -> None:
        """Take every key of `rules` that the tree has. Raises nothing: a bad value becomes a problem."""
        for key, rule in rules.items():
            value = tree.take(key)
            if value is ABSENT:
                continue
            target, convert = (rule, None) if isinstance(rule, str) else rule
            try:
                self.put(target, value if convert is None else convert(value), tree.full(key))
            except (ValueError, TypeError, KeyError) as error:
                self.problems.append(Problem(tree.full(key), value, f"cannot be converted: {error}"))

    def drop(self, tree: Tree, reasons: Mapping[str, str]) -> None:
        """Note keys, or whole tables, that prl has no counterpart of."""
        for key, reason in reasons.items():
            if tree.has(key):
                value = tree.take(key)
                inner = Tree(value if isinstance(value, dict) else {}, tree.full(key))
                keys = [name for name, _ in inner.leaves()] or [tree.full(key)]
                self.without |= dict.fromkeys(keys, reason)

    def refuse_rest(self, tree: Tree, known: Mapping[str, Any]) -> None:
        """Whatever is left is no key of the format."""
        for key, value in tree.leaves():
            local = key.removeprefix(f"{tree.path}.") if tree.path else key
            remedy = suggest(local, known) if known else ""
            shown = NO_VALUE if isinstance(value, dict | list) else value
            self.problems.append(Problem(key, shown, "unknown key", remedy))


def kind_of(tree: Tree, default: str, names: Mapping[str, str], notes: Translation, group: str) -> str | None:
    """Choose an option by a union's `type`; None, and a problem, for one that does not exist."""
    given = tree.take("type")
    name = default if given is ABSENT else str(given)
    if name not in names:
        notes.problems.append(Problem(tree.full("type"), name, "no such variant", suggest(name, names)))
        return None
    notes.choose(group, names[name], tree.full("type") if given is not ABSENT else "")
    return name
