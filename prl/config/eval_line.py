"""The short form of `prl eval`: `reverse_text -n 32 -r 4 -m MODEL --client.base_url URL` as overrides.

| word                     | override                                                          |
|--------------------------|-------------------------------------------------------------------|
| a name                   | `env=[name]`, or `+env.<name>.id=<taskset>` for what is no option |
| `-n 32`, `-s`            | `select.limit=32`, `select.shuffle=true`                          |
| `-r 4`, `-c 8`           | `rollout.group_size=4`, `concurrency=8`                           |
| `-m NAME`                | the option `model=NAME`, a directory, or a name at the endpoint   |
| `--sampling.x V`         | `rollout.sampling.x=V`                                            |
| `--env.x V`              | `env.<name>.x=V` of each environment named                        |
| `--resume`               | `run.resume=latest`                                               |
| `--any.key V`            | `any.key=V`                                                       |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prl.config.command_line import HYDRA_FLAGS, OWN_FLAGS
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.store import conf_dir

COMMAND = "eval"
VALUES = {"-n": "select.limit", "-r": "rollout.group_size", "-c": "concurrency"}
"""Flags that one number follows."""
SWITCHES = {"-s": "select.shuffle=true", "--shuffle": "select.shuffle=true", "--resume": "run.resume=latest"}
PASSED_WITH_VALUE = ("--config-dir", "-cd", "--config-name", "-cn", "--cfg", "--package", "-p")
PLAIN = re.compile(r"[\w./:@+%-]+")
"""Text that Hydra reads as it is."""


@dataclass
class _Line:
    names: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    env_keys: list[tuple[str, str]] = field(default_factory=list)
    model: str | None = None
    directories: list[Path] = field(default_factory=lambda: [conf_dir()])
    problems: list[Problem] = field(default_factory=list)


def expand(words: Sequence[str]) -> list[str]:
    """`words` with the short form of `prl eval` written out; those of other commands as they are.

    Raises ConfigErrors for a flag without its value and for names beside `env=`.
    """
    if not words or words[0] != COMMAND:
        return list(words)
    line = _Line()
    rest = list(words[1:])
    while rest:
        _take(rest.pop(0), rest, line)
    _put_endpoint(line)
    line.words[:0] = [*_environments(line), *_model(line)]
    line.words += [f"env.{slug(name)}.{key}={value}" for name in line.names for key, value in line.env_keys]
    if line.problems:
        raise ConfigErrors(line.problems)
    return [COMMAND, *line.words]


def slug(name: str) -> str:
    """The environment that a taskset id is given as: `owner/my-set@1` -> `my_set`."""
    return re.sub(r"\W", "_", name.rsplit("/", 1)[-1].split("@", 1)[0])


def _take(word: str, rest: list[str], line: _Line) -> None:
    flag, equals, attached = word.partition("=")
    if not word.startswith("-"):
        line.words.append(word) if equals or word[0] in "+~" else line.names.append(word)
    elif flag in SWITCHES:
        line.words.append(SWITCHES[flag])
    elif flag in PASSED_WITH_VALUE:
        line.words.append(word)
        if not equals and rest:
            line.words.append(rest.pop(0))
        if flag in ("--config-dir", "-cd"):
            line.directories.append(Path(attached or line.words[-1]))
    elif (
        flag not in VALUES and flag != "-m" and (flag in (*OWN_FLAGS, *HYDRA_FLAGS, "-h") or flag[:2] != "--")
    ):
        line.words.append(word)
    elif not equals and (not rest or rest[0].startswith("--")):
        line.problems.append(Problem(flag, NO_VALUE, "a value must follow"))
    else:
        _set(flag, attached if equals else rest.pop(0), line)


def _set(flag: str, value: str, line: _Line) -> None:
    key = VALUES.get(flag, flag.removeprefix("--"))
    if flag == "-m" or key == "model":
        line.model = value
    elif key.startswith("env."):
        line.env_keys.append((key.removeprefix("env."), _readable(value)))
    elif key.startswith("sampling."):
        line.words.append(f"rollout.{key}={_readable(value)}")
    else:
        line.words.append(f"{key}={_readable(value)}")


def _environments(line: _Line) -> Iterator[str]:
    given = next((word for word in line.words if word.startswith("env=")), None)
    if line.names and given:
        reason = f"environments are named twice, here and by {given}"
        line.problems.append(Problem(line.names[0], NO_VALUE, reason, "Use one of the two."))
    if line.env_keys and not line.names:
        key = f"--env.{line.env_keys[0][0]}"
        remedy = "Write env.<name>.<key>=<value>, or name the environment first: prl eval <name> ..."
        line.problems.append(Problem(key, NO_VALUE, "it is not said of which environment", remedy))
    if not line.names:
        return
    options = [slug(name) for name in line.names if _is_option(line, "env", slug(name))]
    yield f"env=[{','.join(options)}]"
    for name in line.names:
        if slug(name) not in options:
            yield f"+env.{slug(name)}.id={_readable(name)}"


def _model(line: _Line) -> Iterator[str]:
    if line.model is None:
        return
    path = Path(line.model).expanduser()
    external = any(word == "inference=external" for word in line.words)
    if not external and _is_option(line, "model", line.model):
        yield f"model={line.model}"
    elif not external and path.is_dir():
        yield from (f"model.name={_readable(path.resolve().name)}", f"model.path={_readable(str(path))}")
    else:
        yield f"model.name={_readable(line.model)}"


def _put_endpoint(line: _Line) -> None:
    """An endpoint was named, so that none is started."""
    named = any(word.startswith("client.base_url=") for word in line.words)
    if named and not any(word.startswith("inference=") for word in line.words):
        line.words.append("inference=external")


def _is_option(line: _Line, group: str, name: str) -> bool:
    return any((directory / group / f"{name}.yaml").is_file() for directory in line.directories)


def _readable(value: str) -> str:
    """`value` in Hydra's grammar; lists, tables and quoted text are left to its author."""
    from prl.config.overrides import quoted

    return value if not value or PLAIN.fullmatch(value) or value[0] in "[{'\"" else quoted(value)
