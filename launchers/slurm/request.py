"""What a job asks SLURM for: `cluster` in submitit's terms, and the sbatch script that comes of it.

The parameters have the names of hydra-submitit-launcher's configuration, so that both ways to submit (a run,
and a sweep through Hydra) go through the same lines.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import launchers
from launchers.sweep import PLUGINS
from prl.config.cluster import SlurmConfig, minutes_of, warning_seconds

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmExecutor

ALWAYS = ("--kill-on-bad-exit=1", "--wait=0", "--open-mode=append")
"""srun: a task that fails ends all others, one that is done ends nobody (clusters may set a WaitTime); a
requeued job goes on in the same log."""

EXECUTOR_ONLY = ("submitit_folder", "max_num_timeout", "python", "dry_run", "wait", "poll_seconds")
"""Parameters of the launcher's configuration that do not reach the script's header."""


def parameters(cluster: SlurmConfig, name: str) -> dict[str, Any]:
    """Launcher parameters of one job of `cluster`, called `name`."""
    requeue = "requeue" if cluster.max_requeues else "no-requeue"
    wanted = {
        "name": cluster.job_name or name,
        "nodes": cluster.nodes,
        "tasks_per_node": 1,
        "timeout_min": minutes_of(cluster.time),
        "signal_delay_s": warning_seconds(cluster),
        "stderr_to_stdout": True,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "gres": cluster.gres,
        "gpus_per_node": None if cluster.gres else cluster.gpus_per_node,
        "cpus_per_task": cluster.cpus_per_task,
        "mem_gb": cluster.mem_gb,
        "constraint": cluster.constraint,
        "nodelist": cluster.nodelist,
        "exclude": cluster.exclude,
        "exclusive": cluster.exclusive or None,
        "setup": setup_lines(cluster) or None,
        "srun_args": cluster.srun_args or None,
        "python": cluster.python,
        "array_parallelism": cluster.array_parallelism,
        "additional_parameters": {requeue: True, **cluster.extra},
    }
    return {key: value for key, value in wanted.items() if value is not None}


def merge_options(
    options: Mapping[str, Any], wanted: Mapping[str, Any], typed: Container[str]
) -> dict[str, Any]:
    """Options of a Hydra launcher, where what `cluster` wants wins, except over what the user typed."""
    merged = {**options, **{key: value for key, value in wanted.items() if key not in typed}}
    table = "additional_parameters"
    merged[table] = {**(wanted.get(table) or {}), **(merged.get(table) or {})}
    return merged


def setup_lines(cluster: SlurmConfig) -> list[str]:
    """Shell lines before srun: environment, the user's lines, then the last word."""
    lines = [cluster.activate, import_line(), *cluster.setup, cluster.pre_run]
    return [line for line in lines if line]


def import_line() -> str | None:
    """Makes a checkout importable on the nodes from any directory; an installed package is so already."""
    root = Path(launchers.__file__).parents[1]
    if any(part in ("site-packages", "dist-packages") for part in root.parts):
        return None
    paths = shlex.quote(f"{root}:{PLUGINS}")
    return f"export PYTHONPATH={paths}${{PYTHONPATH:+:$PYTHONPATH}}"


def make_executor(wanted: Mapping[str, Any], folder: Path | str) -> SlurmExecutor:
    """submitit's executor for launcher parameters; works on machines without SLURM too.

    Raises ValueError when submitit is not installed, or does not know a parameter.
    """
    executor_class = _executor_class()
    python = wanted.get("python") or shlex.quote(sys.executable)
    executor = executor_class(folder, max_num_timeout=wanted.get("max_num_timeout", 0), python=python)
    header = {key: value for key, value in wanted.items() if key not in EXECUTOR_ONLY and value is not None}
    given = [argument for argument in header.get("srun_args", ()) if argument not in ALWAYS]
    header["srun_args"] = [*ALWAYS, *given]
    executor.update_parameters(**executor._convert_parameters(header))
    return executor


def script(executor: SlurmExecutor, elements: int = 1) -> str:
    """The sbatch file that submitting `elements` runs would write."""
    if elements > 1:
        executor.parameters["map_count"] = elements
    try:
        return executor._make_submission_file_text(executor._submitit_command_str, "")
    finally:
        executor.parameters.pop("map_count", None)


def _executor_class() -> type[SlurmExecutor]:
    try:
        from submitit.slurm.slurm import SlurmExecutor
    except ModuleNotFoundError:
        raise ValueError(
            "cluster=slurm needs submitit, which is not installed: pip install 'prl[slurm]'"
        ) from None

    class Executor(SlurmExecutor):
        """Does not insist on srun: a dry run has no use for it, and a missing sbatch is told by name."""

        @classmethod
        def affinity(cls) -> int:
            return 2

    return Executor
