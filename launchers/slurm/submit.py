"""`cluster=slurm` for one run: print the script, or refuse, or submit and return, or submit and wait."""

from __future__ import annotations

import copy
import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchers.dry_run import memory
from launchers.nodes import nominal_gpus, place_on_nodes
from launchers.placement import PARTS, Role, format_table
from launchers.run_directory import plan_by_name, plan_run
from launchers.slurm.job import run_job
from launchers.slurm.preflight import refuse, told_by_sbatch
from launchers.slurm.queue import active, cancel, ended_as
from launchers.slurm.request import make_executor, parameters, script
from prl.config.load import dump_resolved
from prl.run_dir import RunDir, write_atomic

REFUSED = 2
DIRECTORY = "slurm"
"""Below the run directory: what submitit writes, and the logs of the nodes."""


def submit(command: str, config: Any, words: list[str]) -> int:
    """Submit `prl command` with this config as one job; the exit code.

    Without `cluster.wait` it is 0 once SLURM took the job, with it that of the job. 2: refused.
    """
    try:
        directory = job_directory(command, config)
        look_ahead(command, copy.deepcopy(config))
        roles = placed(command, config, directory)
        executor = make_executor(parameters(config.cluster, directory.name), directory / DIRECTORY / "%j")
        text = script(executor)
        if config.dry_run:
            print(describe(command, config, roles, text))
            return 0
        refuse(config.cluster, directory, text)
        with told_by_sbatch():
            job = executor.submit(run_job, command, dump_resolved(command, config), words)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    log = Path(str(job.paths.stdout).replace("%t", "0"))
    facts = {"job": job.job_id, "command": shlex.join(["prl", *words]), "time": time.time(), "log": str(log)}
    write_atomic(directory / DIRECTORY / "job.json", json.dumps(facts, indent=1) + "\n")
    print(receipt(config.cluster.nodes, job.job_id, directory, log), flush=True)
    return wait(job.job_id, log, config.cluster.poll_seconds) if config.cluster.wait else 0


def job_directory(command: str, config: Any) -> Path:
    """The run directory, and what makes its path hold on every node."""
    if command == "export":
        config.run = str(Path(config.run).expanduser().resolve())
        return Path(config.run)
    config.output_dir = str(Path(config.output_dir).expanduser().resolve())
    return Path(config.output_dir) / config.run.name


def look_ahead(command: str, config: Any) -> None:
    """Raises ValueError for what the job itself would refuse when its turn comes. Changes `config`."""
    if command == "export":
        from launchers.run_export import check_export

        check_export(config)
    elif command == "eval":
        from launchers.run_eval import plan_evaluation

        plan_evaluation(config, plan_by_name)
    else:
        (plan_run if hasattr(config, "ckpt") else plan_by_name)(config)


def placed(command: str, config: Any, directory: Path) -> list[Role]:
    """Roles of a job on its nodes, none for a command without any. Raises ValueError when they do not fit."""
    if command not in PARTS:
        return []
    resolved = RunDir(directory).resolved_config
    return place_on_nodes(command, config, resolved, nominal_gpus(config.cluster))


def describe(command: str, config: Any, roles: list[Role], text: str) -> str:
    """What a dry run prints: the resolved config, the placement, and the script as it would be submitted."""
    parts = [f"--- resolved config\n{dump_resolved(command, config).rstrip()}"]
    if roles:
        parts.append(f"--- placement on {nodes_in_words(config.cluster.nodes)}\n{format_table(roles)}")
        parts.append(f"--- memory\n{memory(config, roles)}")
    parts += [f"--- sbatch script\n{text.rstrip()}", "dry run: nothing was submitted, nothing was written"]
    return "\n".join(parts)


def receipt(nodes: int, job: str, directory: Path, log: Path) -> str:
    """How to follow and to end what was submitted."""
    rows = {
        "run": str(directory),
        "log": str(log),
        "follow": f"tail -F {shlex.quote(str(log))}",
        "state": f"squeue -j {job}",
        "cancel": f"scancel {job}",
    }
    head = f"submitted job {job} on {nodes_in_words(nodes)}"
    return "\n".join([head, *(f"{name:12}{value}" for name, value in rows.items())])


def nodes_in_words(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}"


def wait(
    job: str,
    log: Path,
    seconds: float,
    look: Callable[[str], dict[str, str] | None] = active,
    pause: Callable[[float], None] = time.sleep,
) -> int:
    """Print the log as it grows until the job has ended. 0 when it completed; Ctrl-C cancels the job."""
    shown = 0
    try:
        while (states := look(job)) is None or states:
            shown = _print_from(log, shown)
            pause(seconds)
    except KeyboardInterrupt:
        cancel([job])
        print(f"interrupted: job {job} was cancelled", file=sys.stderr)
        return 130
    _print_from(log, shown)
    state = ended_as([job])[job]
    print(f"job {job}: {state}")
    return 0 if state == "COMPLETED" else 1


def _print_from(log: Path, offset: int) -> int:
    """Print what is new in `log`; where to go on."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return offset
    sys.stdout.write(data.decode(errors="replace"))
    sys.stdout.flush()
    return offset + len(data)
