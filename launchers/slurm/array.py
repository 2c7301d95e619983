"""One SLURM array for the elements of a sweep: submitted once, followed to the end, each told for itself."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launchers.slurm.preflight import array_fits, told_by_sbatch
from launchers.slurm.queue import active, ask, cancel, ended_as
from launchers.slurm.request import make_executor
from prl.config.errors import ConfigErrors

if TYPE_CHECKING:
    from submitit.slurm.slurm import SlurmJob

log = logging.getLogger(__name__)

RESULT_SECONDS = 10.0
"""How long the result of a completed task may take to show up on a shared file system."""


@dataclass(frozen=True)
class Ended:
    """How one element ended. `result` is what its task returned, `error` why there is none."""

    job: str
    log: Path
    state: str
    result: Any = None
    error: str | None = None


def submit_array(
    wanted: Mapping[str, Any], folder: Path | str, function: Any, arguments: Sequence[tuple[Any, ...]]
) -> list[SlurmJob[Any]]:
    """Submit `function(*arguments[i])` for every i as one array. Raises ConfigErrors if SLURM refuses it."""
    problems = list(array_fits(len(arguments), ask("scontrol", "show", "config") or ""))
    if problems:
        raise ConfigErrors(problems)
    with told_by_sbatch():
        return make_executor(wanted, folder).map_array(function, *zip(*arguments, strict=True))


def log_of(job: SlurmJob[Any]) -> Path:
    """The log of the first task of `job`."""
    return Path(str(job.paths.stdout).replace("%t", "0"))


def follow(jobs: Sequence[SlurmJob[Any]], seconds: float) -> list[Ended]:
    """Wait until every job has ended, by SLURM's word and not by that of results, which the dead leave none.

    On KeyboardInterrupt all of them are cancelled.
    """
    arrays = sorted({job.job_id.split("_")[0] for job in jobs})
    try:
        while not all(active(array) == {} for array in arrays):
            time.sleep(seconds)
    except KeyboardInterrupt:
        log.error("interrupted: cancelling %s", " ".join(arrays))
        cancel(arrays)
        raise
    states = ended_as(job.job_id for job in jobs)
    return [_ended(job, states[job.job_id]) for job in jobs]


def _ended(job: SlurmJob[Any], state: str) -> Ended:
    deadline = time.monotonic() + (RESULT_SECONDS if state == "COMPLETED" else 0.0)
    while not job.paths.result_pickle.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    if not job.paths.result_pickle.exists():
        return Ended(job.job_id, log_of(job), state, error=f"job {job.job_id} ended {state} without a result")
    from submitit.core.utils import pickle_load

    kind, result = pickle_load(job.paths.result_pickle)
    if kind == "success":
        return Ended(job.job_id, log_of(job), state, result=result)
    return Ended(job.job_id, log_of(job), state, error=str(result).strip().splitlines()[-1])
