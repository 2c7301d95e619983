"""What Hydra's own application does better than prl: `--cfg`, `--info`, `--multirun` and their like.

Everything is validated by `prl.config.compose` first, so Hydra meets only overrides that it can read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.config.command_line import CommandLine
from prl.config.compose import compose_job, open_options
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.overrides import quoted
from prl.config.store import conf_dir

Job = Callable[[Any, Sequence[str]], int]
"""(config, words of its command line) -> exit code."""

SET_BY_SWEEP = ("run.name", "run.resume", "run.clean", "output_dir")
"""A sweep gives each element its own directory, `multirun/<sweep>/<number>`."""

INTERRUPTED = (130, 143)
"""Exit codes of a run that Ctrl-C or SIGTERM ended: the rest of its sweep shall not start."""


def show(line: CommandLine) -> int:
    """Serve `--cfg`, `--info` and Hydra's other flags. Raises ConfigErrors."""
    if {"--cfg", "--info"} & set(line.hydra_flags):
        compose_job(line.command, line.overrides, line.config_dirs, line.config_name)
    _run_hydra(line, lambda _: None, line.hydra_flags)
    return 0


def sweep(line: CommandLine, job: Job) -> int:
    """Run `job(config, words)` for every combination of the swept values; the first exit code that is not 0.

    `words` is the command line that runs this element alone.

    Raises ConfigErrors, before anything runs, when any combination is refused.
    """
    configs = _check_elements(line)
    if any(getattr(config, "dry_run", False) for config in configs):
        return _dry_run(line, configs, job)
    codes: dict[str, int] = {}

    def run_element(_: Any) -> None:
        overrides = _element_overrides(line)
        config = _compose(line, overrides)
        codes[config.run.name] = job(config, [line.command, *_own_flags(line), *overrides])
        if codes[config.run.name] in INTERRUPTED:
            raise KeyboardInterrupt

    try:
        _run_hydra(line, run_element, ["--multirun"])
    except KeyboardInterrupt:
        return next((code for code in codes.values() if code in INTERRUPTED), INTERRUPTED[0])
    failed = [f"element {name}: exit code {code}" for name, code in codes.items() if code]
    print("\n  ".join([f"sweep: {len(codes)} runs, {len(failed)} failed", *failed]))
    return next((code for code in codes.values() if code), 0)


def _dry_run(line: CommandLine, configs: list[Any], job: Job) -> int:
    """The plan of every element, without the directory that Hydra would make."""
    codes = []
    for number, config in enumerate(configs):
        print(f"--- element {number} of {len(configs)}, in multirun/<sweep>/{number}", flush=True)
        codes.append(job(config, [line.command, *_own_flags(line), *line.overrides]))
    return max(codes)


def _check_elements(line: CommandLine) -> list[Any]:
    """Configs of all elements, or of what they share where the sweeper decides later. Raises ConfigErrors."""
    if line.command == "export":
        raise ConfigErrors([Problem("--multirun", NO_VALUE, "there is nothing to sweep in an export")])
    taken = [word for word in line.overrides if word.lstrip("+~").split("=")[0] in SET_BY_SWEEP]
    remedy = "Remove it; hydra.sweep.dir=<directory> moves the sweep."
    reason = "a sweep names its runs itself: multirun/<sweep>/<number>"
    if taken:
        raise ConfigErrors([Problem(*word.partition("=")[::2], reason, remedy) for word in taken])
    configs: list[Any] = []
    problems: list[Problem] = []
    for element in _elements(line):
        try:
            configs.append(_compose(line, element))
        except ConfigErrors as errors:
            problems += [problem for problem in errors.problems if problem not in problems]
    if problems:
        raise ConfigErrors(problems)
    return configs


def _compose(line: CommandLine, overrides: list[str]) -> Any:
    """A sweep's values arrive as numbers, not as typed, so text fields refuse them unless quoted."""
    return compose_job(line.command, overrides, line.config_dirs, line.config_name, numbers_as_text=False)


def _elements(line: CommandLine) -> list[list[str]]:
    """Overrides of each element; only what they share when another sweeper than the basic one is chosen."""
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.errors import HydraException

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled = options.reader.settle(options.words, sweeps=True)
        if settled.problems:
            raise ConfigErrors(settled.problems)
        overrides = options.reader.parser.parse_overrides(settled.lines)
    sweepers = [word for word in line.overrides if word.startswith("hydra/sweeper=")]
    if sweepers and sweepers[-1] != "hydra/sweeper=basic":
        return [[override.input_line or "" for override in overrides if not override.is_sweep_override()]]
    try:
        (batch,) = BasicSweeper.split_arguments(overrides, None)
    except HydraException as error:
        raise ConfigErrors([Problem("--multirun", NO_VALUE, str(error).rstrip("."))]) from None
    return batch


def _element_overrides(line: CommandLine) -> list[str]:
    """Overrides of the element that Hydra is running now, with the directory that Hydra made for it."""
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    directory = Path(hydra.runtime.output_dir)
    searchpath = [word for word in line.overrides if word.startswith("hydra.searchpath=")]
    place = [f"output_dir={quoted(str(directory.parent))}", f"run.name={quoted(directory.name)}"]
    return [*searchpath, *hydra.overrides.task, *place]


def _own_flags(line: CommandLine) -> list[str]:
    """Where the user's own options come from, in words that Hydra understands as well."""
    directory = ["--config-dir", line.config_dirs[0]] if line.config_dirs else []
    return [*directory, *(["--config-name", line.config_name] if line.config_name else [])]


def _run_hydra(line: CommandLine, task: Callable[[Any], None], flags: Sequence[str]) -> None:
    """Hydra's application, as if it had been called with `flags` and the line's overrides."""
    import hydra

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled = options.reader.settle(options.words, sweeps=True)
    original, sys.argv = sys.argv, [sys.argv[0], *flags, *_own_flags(line), *settled.lines]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=line.command)(task)()
    finally:
        sys.argv = original
