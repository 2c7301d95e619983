"""What went wrong in a configuration, worded so that the user can repair it at once."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """One fault: `path = value: reason. remedy`. `involves`: other keys that the reason speaks about."""

    path: str
    value: Any
    reason: str
    remedy: str = ""
    involves: tuple[str, ...] = ()
    warning: bool = False

    def __str__(self) -> str:
        subject = self.path if self.value is NO_VALUE else f"{self.path} = {show(self.value)}"
        return f"{subject}: {self.reason}." + (f" {self.remedy}" if self.remedy else "")


class ConfigErrors(ValueError):
    """Every problem of one composition, in the order of the overrides and fields."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


NO_VALUE = object()
"""A problem that has no value to show (a missing key, an unreadable argument)."""


def show(value: Any) -> str:
    """A value as one would type it, cut to one line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The name that `word` was probably meant to be."""
    matches = difflib.get_close_matches(word.lower(), list(names), n=1, cutoff=0.5)
    return matches[0] if matches else None


def suggest(word: str, names: Iterable[str]) -> str:
    """Remedy for a wrong name: `Nearest: x; valid: x, y, z.`"""
    names = sorted(names)
    close = nearest(word, names)
    listing = f"valid: {', '.join(names) or 'none'}."
    return f"Nearest: {close}; {listing}" if close else listing.capitalize()


def shell_word(text: str) -> str:
    """`text` as one shell argument, double-quoted where that reads better."""
    if any(character in text for character in '"$`\\!'):
        return shlex.quote(text)
    return f'"{text}"'
