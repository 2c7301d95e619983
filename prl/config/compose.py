"""From a command and its overrides to a typed, checked config, or to the list of everything wrong with it."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from launchers.sweep import find_plugins
from prl.config import checks, identity
from prl.config.composition import choose, set_key
from prl.config.errors import NO_VALUE, ConfigErrors, Problem, shell_word, suggest
from prl.config.load import build
from prl.config.overrides import OverrideReader, Settled
from prl.config.schema import JOBS
from prl.config.search_path import check_directory, judge_search_path, other_command
from prl.config.store import conf_dir, register_schemas
from prl.config.validate import Validator

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)


def compose_job(
    command: str,
    overrides: Sequence[str],
    config_dirs: Sequence[str | Path] = (),
    config_name: str | None = None,
    *,
    numbers_as_text: bool = True,
) -> Any:
    """The typed config (`JOBS[command]`) of `prl command overrides...`.

    `config_dirs` hold the user's own options; `config_name` is a primary config other than the command's.
    With `numbers_as_text`, a text field keeps a number as typed (`run.name=1e3`); without, it is refused.
    Raises ConfigErrors with every problem found: grammar, options, keys, types, bounds, combinations.
    Touches nothing on disk. Warnings go to the log.
    """
    if command not in JOBS:
        raise ConfigErrors([Problem("command", command, "no such command", suggest(command, JOBS))])
    with open_options(command, overrides, config_dirs, config_name) as options:
        settled, tree = options.compose()
    return check_tree(command, settled, tree, numbers_as_text)


def check_tree(command: str, settled: Settled, tree: dict[str, Any] | None, numbers_as_text: bool) -> Any:
    """The typed config of a composed tree. Raises ConfigErrors with what `settled` and the checks found."""
    validator = Validator(settled.as_typed if numbers_as_text else {})
    clean = validator.node(JOBS[command], tree, "") if tree is not None else {}
    problems = [*settled.problems, *_beyond(settled.bad_groups, validator.problems)]
    if tree is None or validator.incomplete:
        raise ConfigErrors(problems)
    config: Any = build(JOBS[command], clean)
    warnings = _judge(command, config, problems)
    if problems:
        raise ConfigErrors(problems)
    for warning in warnings:
        logger.warning("warning: %s", warning)
    return identity.complete(command, config)


def _judge(command: str, config: Any, problems: list[Problem]) -> list[Problem]:
    """Add what the rules between fields find to `problems`; return their warnings.

    A rule whose fields are already known to be wrong is not heard: a default stood in for them.
    """
    bad = {problem.path for problem in problems}
    verdicts = [verdict for verdict in checks.check(command, config) if not _follows(verdict, bad)]
    problems += [verdict for verdict in verdicts if not verdict.warning]
    return [verdict for verdict in verdicts if verdict.warning]


@dataclass
class Options:
    """The options of one command, open for composing."""

    reader: OverrideReader
    config_name: str
    words: list[str]
    problems: list[Problem]

    def compose(self) -> tuple[Settled, dict[str, Any] | None]:
        """(settled overrides with their problems, the composed plain tree or None)."""
        settled, config = self.settle()
        if config is None:
            return settled, None
        try:
            return settled, plain(config)
        except (OmegaConfBaseException, ValueError) as error:
            settled.problems.append(_composition_problem(error))
            return settled, None

    def settle(self, sweeps: bool = False) -> tuple[Settled, DictConfig | None]:
        """(settled overrides, what they make of the options, or None). With `sweeps`, of first values."""
        settled = self.reader.settle(self.words, sweeps)
        settled.problems[:0] = self.problems
        try:
            config = choose(self.reader.loader, self.config_name, settled.first_choices)
        except (HydraException, OmegaConfBaseException, ValueError, YAMLError) as error:
            if not (isinstance(error, UnicodeDecodeError) and self.problems):  # these name the file
                settled.problems.append(_composition_problem(error))
            return settled, None
        self.set_keys(settled, config)
        return settled, config

    def set_keys(self, settled: Settled, config: DictConfig) -> None:
        """Set the keys of `settled` in `config`; what cannot be set becomes a problem."""
        chosen = list(config.get("env") or {})
        own = {
            override.key_or_group.split(".")[1] for override in settled.values if _adds_environment(override)
        }
        absent: set[str] = set()
        for override in settled.values:
            name = _environment_of(override.key_or_group) if "env" in config else None
            if name is not None and not override.is_add() and name not in {*chosen, *own}:
                if name not in absent:
                    settled.problems.append(self._not_chosen(override, name, chosen))
                absent.add(name)
                continue
            if (name := _not_evaluated(override, config)) is not None:
                key, _, value = (override.input_line or "").partition("=")
                remedy = f"Choose it: eval.env=[{','.join([*config['eval']['env'], name])}]."
                settled.problems.append(Problem(key, value, "nothing is evaluated on it", remedy))
                continue
            try:
                settled.note(override, set_key(config, override))
            except HydraException as error:
                settled.problems.append(_setting_problem(override, error))

    def _not_chosen(self, override: Override, name: str, chosen: list[str]) -> Problem:
        """A change to an environment that was not chosen would make a half-filled one."""
        key, _, value = (override.input_line or "").lstrip("+~").partition("=")
        own = f"Make your own by +env.{name}.id=<taskset>."
        choose_it = f"Choose it by env=[{','.join([*chosen, name])}]."
        remedy = choose_it if name in self.reader.options("env") else f"{suggest(name, chosen)} {own}"
        return Problem(key, value, "this environment was not chosen", remedy)


def plain(config: DictConfig) -> dict[str, Any]:
    """A composed config as dicts and lists, interpolations resolved."""
    tree = OmegaConf.to_container(config, resolve=True)
    assert isinstance(tree, dict)
    return {str(key): value for key, value in tree.items()}


@contextmanager
def open_options(
    command: str,
    overrides: Sequence[str],
    config_dirs: Sequence[str | Path] = (),
    config_name: str | None = None,
) -> Iterator[Options]:
    """Start Hydra's compose API on prl's options and those in `config_dirs`."""
    from hydra import initialize_config_dir
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.global_hydra import GlobalHydra

    register_schemas()
    find_plugins()
    directories = [Path(directory).expanduser().resolve() for directory in config_dirs]
    problems = [problem for directory in directories for problem in check_directory(directory)]
    problems += other_command(command, config_name, list(JOBS))
    overrides, unusable = judge_search_path(overrides)
    problems += unusable
    if any(problem.path == "--config-name" for problem in problems):
        raise ConfigErrors(problems)
    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None  # a sweep is running around us
    try:
        with initialize_config_dir(str(conf_dir()), job_name="prl", version_base="1.3"):
            loader = GlobalHydra.instance().config_loader()
            assert isinstance(loader, ConfigLoaderImpl)
            _add_to_search_path(loader, directories)
            name = config_name or command
            yield Options(OverrideReader(command, loader, name, overrides), name, list(overrides), problems)
    finally:
        GlobalHydra.instance().hydra = outer


def _add_to_search_path(loader: ConfigLoaderImpl, directories: Sequence[Path]) -> None:
    """As `--config-dir` does in Hydra's own application: after the main directory, before the schemas."""
    from hydra.core.config_search_path import SearchPathQuery

    for directory in directories:
        anchor = SearchPathQuery(provider="schema", path=None)
        loader.config_search_path.prepend("command-line", f"file://{directory}", anchor)
    loader.repository.initialize_sources(loader.config_search_path)


def _environment_of(key: str) -> str | None:
    """`b` of the key `env.b.ratio`."""
    parts = key.split(".")
    return parts[1] if parts[0] == "env" and len(parts) > 1 else None


def _not_evaluated(override: Override, config: DictConfig) -> str | None:
    """`b` of a change to `eval.env.b`, if that was not chosen: it would be half-filled."""
    parts = override.key_or_group.split(".")
    if parts[:2] != ["eval", "env"] or len(parts) < 4 or override.is_add() or override.is_force_add():
        return None
    chosen = (config.get("eval") or {}).get("env")
    return parts[2] if chosen is not None and parts[2] not in chosen else None


def _adds_environment(override: Override) -> bool:
    added = override.is_add() or override.is_force_add()
    return added and _environment_of(override.key_or_group) is not None


def _beyond(bad_groups: set[str], problems: list[Problem]) -> list[Problem]:
    """Problems that do not merely follow from an option that does not exist."""
    return [problem for problem in problems if problem.path.split(".")[0] not in bad_groups]


def _follows(verdict: Problem, bad: set[str]) -> bool:
    """Whether a verdict rests on a value that was refused itself, or that lies below it."""
    paths = (verdict.path, *verdict.involves)
    return any(other == path or other.startswith(f"{path}.") for path in paths for other in bad)


_FAMILIAR = (
    (
        re.compile(r"Could not delete '([\w/@.]+)(?:=[^']*)?'\. No match"),
        "it is not chosen, so it cannot be removed",
        "",
    ),
    (
        re.compile(r"Multiple values for ([\w/@.]+)\. To override a value use 'override [\w/@.]+: (\w+)'"),
        "chosen twice",
        r"Write \1=\2 on the command line, `override /\1: \2` in a file.",
    ),
    (re.compile(r"Could not override '(hydra[\w.]*)'"), "Hydra has no such key", ""),
)
"""What Hydra says of a defaults list -> (reason, remedy)."""


def _unreadable_file(error: YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None)
    where = f"{mark.name}, line {mark.line + 1}" if mark else "an option's file"
    return Problem(where, NO_VALUE, f"not YAML: {getattr(error, 'problem', None) or error}")


def _composition_problem(error: Exception) -> Problem:
    """What Hydra or OmegaConf refused, without their inner terms."""
    for told in _FAMILIAR:
        if (match := told[0].search(str(error))) is not None:
            return Problem(match[1], NO_VALUE, told[1], match.expand(told[2]))
    if isinstance(error, YAMLError):
        return _unreadable_file(error)
    cause = error.__cause__ or error
    if str(error):
        cause = error
    key = getattr(cause, "full_key", None) or "composition"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    inner = ("full_key:", "object_type=", "provider=", "Config search")
    kept = " ".join(line for line in lines if not line.startswith(inner))
    reason = kept.removeprefix("KeyError raised while resolving interpolation: ")
    return Problem(str(key), NO_VALUE, reason.rstrip(".") or type(cause).__name__)


def _setting_problem(override: Override, error: HydraException) -> Problem:
    """A key that Hydra could not set or remove."""
    word = override.input_line or ""
    key, equals, value = word.lstrip("+~").partition("=")
    if override.is_add() and error.__cause__ is None and "Could not append" in str(error):
        remedy = f"Write {shell_word(word[1:])} to change it."
        return Problem(key, value, "`+` adds a key, this one is there already", remedy)
    if override.is_delete():
        return Problem(key, value if equals else NO_VALUE, f"cannot be removed ({_first_line(error)})")
    return Problem(key, value, f"does not fit what is there ({_first_line(error.__cause__ or error)})")


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
