"""What Hydra's own application does better than prl: `--cfg`, `--info`, `--multirun` and their like.

Everything is validated by `prl.config.compose` first, so Hydra meets only overrides that it can read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.config.command_line import CommandLine
from prl.config.compose import check_tree, compose_job, open_options, plain
from prl.config.errors import NO_VALUE, ConfigErrors, Problem, suggest
from prl.config.overrides import quoted
from prl.config.store import conf_dir
from prl.config.sweep_elements import elements

SHOWN = ("job", "hydra", "all")
"""What `--cfg` shows."""

Job = Callable[[Any, Sequence[str]], int]
"""(config, words of its command line) -> exit code."""


def show(line: CommandLine) -> int:
    """Serve `--cfg`, `--info` and Hydra's other flags. Raises ConfigErrors."""
    flags = line.hydra_flags
    _refuse_misused(flags)
    if "--cfg" in flags and flags[flags.index("--cfg") + 1] == "job" and "--info" not in flags:
        return _show_job(line, "--resolve" in flags)
    if {"--cfg", "--info"} & set(flags):
        compose_job(line.command, line.overrides, line.config_dirs, line.config_name)
    run_hydra(line, lambda _: None, flags)
    return 0


def _refuse_misused(flags: list[str]) -> None:
    """What Hydra's own reader of flags would end the process for."""
    what = flags[flags.index("--cfg") + 1] if "--cfg" in flags else None
    if what not in (None, *SHOWN):
        raise ConfigErrors([Problem("--cfg", what, "nothing that can be shown", suggest(str(what), SHOWN))])
    for flag in ("--resolve", "--package"):
        if flag in flags and what is None:
            raise ConfigErrors([Problem(flag, NO_VALUE, "goes with --cfg", f"Write --cfg job {flag}.")])


def _show_job(line: CommandLine, resolve: bool) -> int:
    """`--cfg job [--package p]`, as Hydra prints it, in half the time."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled, config = options.settle()
    if config is None:
        raise ConfigErrors(settled.problems)
    try:
        tree = plain(config)
    except OmegaConfBaseException:
        return int(bool(compose_job(line.command, line.overrides, line.config_dirs, line.config_name)))
    check_tree(line.command, settled, tree, True)
    if resolve:
        OmegaConf.resolve(config)
    flags = line.hydra_flags
    package = flags[flags.index("--package") + 1] if "--package" in flags else None
    shown = config if package in (None, "_global_") else OmegaConf.select(config, str(package))
    if shown is None:
        raise ConfigErrors([Problem("--package", package, "not in the configuration")])
    header = [] if package is None else [f"# @package {package}"]
    text = OmegaConf.to_yaml(shown).rstrip("\n") if OmegaConf.is_config(shown) else str(shown)
    print("\n".join([*header, text]))
    return 0


def sweep(line: CommandLine, job: Job) -> int:
    """Run `job(config, words)` for every combination of the swept values; the first exit code that is not 0.

    `words` is the command line that runs this element alone.

    Raises ConfigErrors, before anything runs, when any combination is refused.
    """
    configs, found = _check_elements(line)
    from launchers.sweeps import command

    if any(getattr(config, "dry_run", False) for config in configs):
        array = configs[0].cluster.name == "slurm"
        return command.dry_run(line, configs, found) if array else _dry_run(line, configs, job)
    return command.run_sweep(line, job, configs, found)


def _dry_run(line: CommandLine, configs: list[Any], job: Job) -> int:
    """The plan of every element, without the directory that Hydra would make."""
    codes = []
    for number, config in enumerate(configs):
        print(f"--- element {number} of {len(configs)}, in multirun/<sweep>/{number}", flush=True)
        codes.append(job(config, [line.command, *own_flags(line), *line.overrides]))
    return max(codes)


def _check_elements(line: CommandLine) -> tuple[list[Any], list[list[str]]]:
    """(configs, overrides) of all elements that can be known before any runs. Raises ConfigErrors."""
    if line.command == "export":
        raise ConfigErrors([Problem("--multirun", NO_VALUE, "there is nothing to sweep in an export")])
    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        found, problems = elements(options)
    if not found and not problems:
        problems.append(Problem("--multirun", NO_VALUE, "no option matches, so there is nothing to run"))
    configs: list[Any] = []
    for element in found:
        try:
            configs.append(compose_element(line, element))
        except ConfigErrors as errors:
            problems += [problem for problem in errors.problems if problem not in problems]
    if problems:
        raise ConfigErrors(problems)
    return configs, found


def compose_element(line: CommandLine, overrides: list[str]) -> Any:
    """A sweep's values arrive as numbers, not as typed, so text fields refuse them unless quoted."""
    return compose_job(line.command, overrides, line.config_dirs, line.config_name, numbers_as_text=False)


def place_of(run: Path) -> list[str]:
    """The overrides by which an element gets its own directory."""
    return [f"output_dir={quoted(str(run.parent))}", f"run.name={quoted(run.name)}"]


def own_flags(line: CommandLine) -> list[str]:
    """Where the user's own options come from, in words that Hydra understands as well."""
    directory = ["--config-dir", line.config_dirs[0]] if line.config_dirs else []
    return [*directory, *(["--config-name", line.config_name] if line.config_name else [])]


def run_hydra(
    line: CommandLine, task: Callable[[Any], Any], flags: Sequence[str], more: Sequence[str] = ()
) -> None:
    """Hydra's application, as if it had been called with `flags`, and `more` before the line's overrides."""
    import hydra

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled, _ = options.settle(sweeps=True)
    original, sys.argv = sys.argv, [sys.argv[0], *flags, *own_flags(line), *more, *settled.lines]
    try:
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=line.command)(task)()
    finally:
        sys.argv = original
