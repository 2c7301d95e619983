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

SWITCHES = ("--help", "--version", "--dry-run", "--multirun", "--resolve", "--hydra-help")
"""Flags that stand alone."""

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


def parse(words: Sequence[str], commands: Sequence[str], tools: Sequence[str] = ()) -> CommandLine:
    """Sort `words`. Raises ConfigErrors for unknown flags and commands, all at once.

    `tools` are names of one or two words that are no commands of a job, for the remedy.
    """
    line, problems = CommandLine(), []
    rest = list(words)
    if rest and _is_command(rest[0]):
        line.command, line.named = rest.pop(0), True
        if line.command not in commands:
            problems.append(_no_command(line.command, rest, commands, tools))
            rest = [word for word in rest if word.startswith("-")] if _is_spaced(line.command, rest) else rest
    while rest:
        word = rest.pop(0)
        name, _, attached = word.partition("=")
        flag = SHORT.get(name, name)
        if word in commands:
            remedy = f"Write prl {word} ..., flags and overrides after it."
            problems.append(
                Problem(word, NO_VALUE, "the command is the first word, and there is one", remedy)
            )
        elif not word.startswith("-"):
            line.overrides.append(word)
        elif flag not in HYDRA_FLAGS and flag not in OWN_FLAGS:
            problems.append(
                Problem(name, NO_VALUE, "no such flag", suggest(name, [*OWN_FLAGS, *HYDRA_FLAGS]))
            )
        elif not _take(line, flag, attached, rest):
            fault = "it takes no value" if flag in SWITCHES else "a value must follow"
            problems.append(Problem(flag, attached or NO_VALUE, fault))
    if "--dry-run" in line.flags:
        line.overrides.append("dry_run=true")  # last: a flag that promises to start nothing wins
    if len(line.config_dirs) > 1:
        remedy = "Add the others by hydra.searchpath=[file:///...]."
        problems.append(Problem("--config-dir", NO_VALUE, "given more than once", remedy))
    if problems:
        raise ConfigErrors(problems)
    return line


def _is_spaced(word: str, rest: list[str]) -> bool:
    """Whether `key = value`, `key value` or `key: value` was written for `key=value`."""
    return bool(rest) and ("." in word or rest[0] == "=" or word.endswith(":"))


def _no_command(word: str, rest: list[str], commands: Sequence[str], tools: Sequence[str]) -> Problem:
    if _is_spaced(word, rest):
        value = next((part for part in rest if part != "="), "...")
        remedy = f"Write {word.rstrip(':')}={value}, without spaces."
        return Problem(word, NO_VALUE, "neither a command nor of the form key=value", remedy)
    second = [tool.partition(" ")[2] for tool in tools if tool.startswith(f"{word} ")]
    if second:
        return Problem(
            word,
            rest[0] if rest else NO_VALUE,
            "a second word is needed",
            suggest(rest[0] if rest else "", second),
        )
    return Problem("command", word, "no such command", suggest(word, [*commands, *tools]))


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
    elif flag in SWITCHES and attached:
        return False
    elif flag in OWN_FLAGS:
        line.flags.add(flag)
    else:
        line.hydra_flags += [flag, value] if value else [flag]
    return True
