"""`prl [command] [flags] overrides...`: sorts the words. Composition comes later and elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from prl.config.errors import NO_VALUE, ConfigErrors, Problem, suggest

HYDRA_FLAGS = ("--cfg", "--package", "--info", "--resolve", "--hydra-help", "--shell-completion")
"""Flags that Hydra itself serves."""

OWN_FLAGS = ("--help", "--version", "--dry-run", "--multirun", "--config-dir", "--config-name")

SHORT = {
    "-h": "--help",
    "-c": "--cfg",
    "-p": "--package",
    "-i": "--info",
    "-m": "--multirun",
    "-cd": "--config-dir",
    "-cn": "--config-name",
    "-sc": "--shell-completion",
}

INFO_TOPICS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")


@dataclass
class CommandLine:
    """The words of one call, sorted. `hydra_flags` are passed on as they are."""

    command: str = "rl"
    named: bool = False
    overrides: list[str] = field(default_factory=list)
    config_dirs: list[str] = field(default_factory=list)
    config_name: str | None = None
    flags: set[str] = field(default_factory=set)
    hydra_flags: list[str] = field(default_factory=list)

    @property
    def multirun(self) -> bool:
        """A chosen sweep says so by itself."""
        return "--multirun" in self.flags or any(word.startswith("sweep=") for word in self.overrides)


def parse(words: Sequence[str], commands: Sequence[str]) -> CommandLine:
    """Sort `words`. Raises ConfigErrors for unknown flags and commands, all at once."""
    line, problems = CommandLine(), []
    rest = list(words)
    if rest and _is_command(rest[0]):
        line.command, line.named = rest.pop(0), True
        if line.command not in commands:
            problems.append(
                Problem("command", line.command, "no such command", suggest(line.command, commands))
            )
    while rest:
        word = rest.pop(0)
        name, _, attached = word.partition("=")
        flag = SHORT.get(name, name)
        if not word.startswith("-"):
            line.overrides.append(word)
        elif flag not in HYDRA_FLAGS and flag not in OWN_FLAGS:
            problems.append(
                Problem(name, NO_VALUE, "no such flag", suggest(name, [*OWN_FLAGS, *HYDRA_FLAGS]))
            )
        elif not _take(line, flag, attached, rest):
            problems.append(Problem(flag, NO_VALUE, "a value must follow"))
    if len(line.config_dirs) > 1:
        remedy = "Add the others by hydra.searchpath=[file:///...]."
        problems.append(Problem("--config-dir", NO_VALUE, "given more than once", remedy))
    if problems:
        raise ConfigErrors(problems)
    return line


def _is_command(word: str) -> bool:
    return "=" not in word and word[:1] not in ("-", "+", "~")


def _take(line: CommandLine, flag: str, attached: str, rest: list[str]) -> bool:
    """Note one flag with its value, `attached` by `=` or first of `rest`; False when the value is absent."""
    value = attached
    if flag in ("--cfg", "--package", "--config-dir", "--config-name") and not value:
        if not rest:
            return False
        value = rest.pop(0)
    elif flag == "--info" and rest and rest[0] in INFO_TOPICS:
        value = rest.pop(0)
    if flag == "--config-dir":
        line.config_dirs.append(value)
    elif flag == "--config-name":
        line.config_name = value.removesuffix(".yaml")
    elif flag == "--dry-run":
        line.overrides.append("dry_run=true")
    elif flag in OWN_FLAGS:
        line.flags.add(flag)
    else:
        line.hydra_flags += [flag, value] if value else [flag]
    return True
