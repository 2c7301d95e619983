"""From a command and its overrides to a typed, checked config, or to the list of everything wrong with it."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prl.config import checks, identity
from prl.config.errors import NO_VALUE, ConfigErrors, Problem, suggest
from prl.config.load import build
from prl.config.overrides import OverrideReader, Settled
from prl.config.schema import JOBS
from prl.config.sources import EnvConfig
from prl.config.store import conf_dir, register_job, register_schemas
from prl.config.validate import Validator

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl

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
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        settled = self.reader.settle(self.words)
        settled.problems[:0] = self.problems
        try:
            tree = self._tree(settled.lines)
            self._drop_absent_environments(settled, tree)
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            settled.problems.append(_composition_problem(error))
            return settled, None
        return settled, tree

    def _tree(self, lines: list[str]) -> dict[str, Any]:
        from hydra import compose
        from omegaconf import OmegaConf

        config: Any = compose(self.config_name, overrides=lines)
        tree = OmegaConf.to_container(config, resolve=True)
        assert isinstance(tree, dict)
        return {str(key): value for key, value in tree.items()}

    def _drop_absent_environments(self, settled: Settled, tree: dict[str, Any]) -> None:
        """Refuse changes to an environment that was not chosen; they would make a half-filled one."""
        table = tree.get("env")
        changed = {key.split(".")[1]: line for key, line in settled.changed.items() if key.startswith("env.")}
        if not isinstance(table, dict) or all(_is_whole(table.get(name)) for name in changed):
            return
        lines = [line for line in settled.lines if line not in settled.changed.values()]
        chosen = self._tree(lines).get("env") or {}
        for name in sorted(set(changed) - set(chosen)):
            word = changed[name].lstrip("+")
            own = f"Make your own by +env.{name}.id=<taskset>."
            choose = f"Choose it by env=[{','.join([*chosen, name])}]."
            remedy = choose if name in self.reader.options("env") else f"{suggest(name, chosen)} {own}"
            settled.problems.append(
                Problem(*word.partition("=")[::2], "this environment was not chosen", remedy)
            )
            table.pop(name, None)


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
    register_job(command)
    directories = [Path(directory).expanduser().resolve() for directory in config_dirs]
    problems = [problem for directory in directories for problem in _check_directory(directory)]
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


def _is_whole(node: Any) -> bool:
    """Whether an environment has every key of its schema, as those from option files do."""
    return isinstance(node, dict) and all(entry.name in node for entry in dataclasses.fields(EnvConfig))


def _check_directory(directory: Path) -> list[Problem]:
    """A directory of the user's options must exist and cannot replace options that prl ships."""
    if not directory.is_dir():
        return [Problem("--config-dir", directory, "no such directory")]
    ours = conf_dir()
    hidden = [path.relative_to(ours) for path in sorted(ours.rglob("*.yaml"))]
    reason = "prl ships an option of this name, so this file would be ignored"
    return [
        Problem("--config-dir", directory / path, reason, "Give it another name.")
        for path in hidden
        if directory != ours and (directory / path).is_file()
    ]


def _beyond(bad_groups: set[str], problems: list[Problem]) -> list[Problem]:
    """Problems that do not merely follow from an option that does not exist."""
    return [problem for problem in problems if problem.path.split(".")[0] not in bad_groups]


def _follows(verdict: Problem, bad: set[str]) -> bool:
    """Whether a verdict rests on a value that was refused itself, or that lies below it."""
    paths = (verdict.path, *verdict.involves)
    return any(other == path or other.startswith(f"{path}.") for path in paths for other in bad)


def _composition_problem(error: Exception) -> Problem:
    """What Hydra or OmegaConf refused, without their inner terms."""
    cause = error.__cause__ or error
    merging = re.match(r"Error merging override \+*(.*)", str(error))
    if merging:
        key, _, value = merging.group(1).partition("=")
        return Problem(key, value, f"does not fit what is there ({_first_line(cause)})")
    if str(error):
        cause = error
    key = getattr(cause, "full_key", None) or "composition"
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    inner = ("full_key:", "object_type=", "provider=", "Config search")
    kept = " ".join(line for line in lines if not line.startswith(inner))
    reason = kept.removeprefix("KeyError raised while resolving interpolation: ")
    return Problem(str(key), NO_VALUE, reason.rstrip(".") or type(cause).__name__)


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
