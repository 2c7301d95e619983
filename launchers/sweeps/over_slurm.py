"""A sweep as a SLURM array: what it asks for, shown by a dry run, and refused before anything is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.placement import format_table
from launchers.slurm.preflight import refuse
from launchers.slurm.request import make_executor, merge_options, parameters, script
from launchers.slurm.submit import job_directory, nodes_in_words, placed
from prl.config.command_line import CommandLine
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.load import dump_resolved
from prl.config.overrides import quoted

LAUNCHER = "prl_slurm"


@dataclass(frozen=True)
class ArrayRequest:
    """The array of a sweep in `directory`: launcher parameters of `cluster`, those of them that were typed by
    hand, and all options with which the launcher goes to work."""

    directory: Path
    wanted: dict[str, Any]
    typed: frozenset[str]
    options: dict[str, Any]

    def script(self, elements: int) -> str:
        """The sbatch file of so many elements, as the launcher submits it. Raises ValueError."""
        return script(make_executor(self.options, self.options["submitit_folder"]), elements)


def array_request(
    line: CommandLine, cluster: Any, launcher: str, directory: Path, wait: bool
) -> ArrayRequest:
    """What the array of the sweep in `directory` asks for. `launcher`: the chosen one, or Hydra's `basic`.

    `wait`: the command stays until the elements have ended.
    """
    words = [word.lstrip("+") for word in line.overrides if word.lstrip("+").startswith("hydra.launcher.")]
    typed = frozenset(word.split("=")[0].split(".")[2] for word in words)
    wanted = {**parameters(cluster, directory.name), "wait": wait, "poll_seconds": cluster.poll_seconds}
    known = _launcher_options(line, LAUNCHER if launcher == "basic" else launcher, directory)
    return ArrayRequest(directory, wanted, typed, merge_options(known, wanted, typed))


def check_array(
    request: ArrayRequest, command: str, cluster: Any, configs: Sequence[Any], elements: int
) -> None:
    """Raises ConfigErrors for an array that the cluster could not run. `elements`: how many it has."""
    try:
        for config in configs:
            placed(command, config, request.directory)
        text = request.script(elements)
    except ValueError as error:
        raise ConfigErrors([Problem("cluster", cluster.name, str(error))]) from None
    refuse(cluster, request.directory, text, elements, "hydra.sweep.dir")


def describe_array(
    request: ArrayRequest,
    command: str,
    configs: Sequence[Any],
    overrides: Sequence[Sequence[str]],
    elements: int,
) -> str:
    """What a dry run prints: the elements, config and placement of the first, and the script of the array."""
    parts = [f"element {number:<4} {' '.join(words)}" for number, words in enumerate(overrides)]
    config, run = configs[0], request.directory / "0"
    config.output_dir, config.run.name = str(run.parent), run.name
    directory = job_directory(command, config)
    nodes = nodes_in_words(config.cluster.nodes)
    parts.append(f"--- resolved config of element 0\n{dump_resolved(command, config).rstrip()}")
    parts.append(
        f"--- placement of each element on {nodes}\n{format_table(placed(command, config, directory))}"
    )
    parts.append(f"--- sbatch script of {elements} elements\n{request.script(elements).rstrip()}")
    return "\n".join([*parts, "dry run: nothing was submitted, nothing was written"])


def one_cluster(configs: Sequence[Any]) -> Any:
    """The `cluster` that all elements share. Raises ConfigErrors: an array asks SLURM once for all."""
    clusters = [config.cluster for config in configs]
    if clusters[0].name == "slurm" and any(cluster != clusters[0] for cluster in clusters):
        reason = "the elements of one array have the same resources"
        raise ConfigErrors(
            [Problem("cluster", NO_VALUE, reason, "Sweep over cluster.* in separate commands.")]
        )
    return clusters[0]


def _launcher_options(line: CommandLine, launcher: str, directory: Path) -> dict[str, Any]:
    """Every option of `launcher` as composed, with the sweep's directory in place."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from prl.config.compose import open_options

    with open_options(line.command, line.overrides, line.config_dirs, line.config_name) as options:
        settled, _ = options.settle(sweeps=True)
        words = [
            *settled.first_choices,
            f"hydra/launcher={launcher}",
            f"hydra.sweep.dir={quoted(str(directory))}",
        ]
        config = options.reader.loader.load_configuration(options.config_name, words, RunMode.MULTIRUN)
    config.hydra.job.name = line.command
    found = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    assert isinstance(found, dict)
    return {str(key): value for key, value in found.items() if key != "_target_"}
