"""Hydra launcher `prl_slurm`, also named `submitit_slurm`: hydra-submitit-launcher without its faults.

* A task that raises, or exits, is FAILED in SLURM, its traceback in the log.
* An element that died without a result does not hide the results of the others.
* Ctrl-C on the waiting command cancels the jobs.
* Of the tasks of one element only the first writes Hydra's files into the element's directory.
* A failed task ends the other tasks of its element.

Every option of hydra-submitit-launcher has its name and meaning here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.errors import CompactHydraException
from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import SlurmLauncher

from launchers.sweep import ARRAY_VAR
from prl.config.errors import ConfigErrors

log = logging.getLogger(__name__)


@dataclass
class PrlSlurmConf(SlurmQueueConf):
    """hydra-submitit-launcher's options, and those that it lacks."""

    _target_: str = "hydra_plugins.prl_launchers._slurm.PrlSlurmLauncher"
    exclusive: bool | None = None
    nodelist: str | None = None
    dependency: str | None = None
    mail_type: str | None = None
    mail_user: str | None = None
    teardown: list[str] | None = None
    srun_args: list[str] | None = None
    python: str | None = None
    dry_run: bool = False  # print the sbatch script, submit nothing
    wait: bool = True  # False: submit and return
    poll_seconds: float = 2.0  # between two looks at the jobs


class PrlSlurmLauncher(SlurmLauncher):
    """Submits the elements of a sweep as one array."""

    def __call__(
        self,
        sweep_overrides: list[str],
        job_dir_key: str,
        job_num: int,
        job_id: str,
        singleton_state: dict[type, Singleton],
    ) -> JobReturn:
        """In the task. Raises what the element raised, so that SLURM sees it."""
        import submitit

        os.environ[ARRAY_VAR] = "1"
        if submitit.JobEnvironment().global_rank > 0:
            sweep_overrides = [*sweep_overrides, "hydra.output_subdir=null", "hydra/job_logging=none"]
        done = super().__call__(sweep_overrides, job_dir_key, job_num, job_id, singleton_state)
        _ = done.return_value
        return done

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        assert self.config is not None
        numbered = {initial_job_idx + i: list(overrides) for i, overrides in enumerate(job_overrides)}
        finished = getattr(self.task_function, "finished", lambda number: None)
        known = {number: record for number in numbered if (record := finished(number)) is not None}
        returned = {number: _returned(numbered[number], record.objective) for number, record in known.items()}
        todo = {number: words for number, words in numbered.items() if number not in known}
        if todo:
            returned |= self._launch(todo)
        return [returned[number] for number in numbered]

    def _launch(self, todo: dict[int, list[str]]) -> dict[int, JobReturn]:
        from launchers.slurm.array import follow, log_of, submit_array
        from launchers.slurm.request import make_executor, script

        wanted = self._wanted()
        folder = wanted["submitit_folder"]
        for number, overrides in todo.items():
            log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
        if wanted["dry_run"]:
            print(script(make_executor(wanted, folder), len(todo)))
            return {number: _returned(words, None) for number, words in todo.items()}
        sweep = Path(str(self.config.hydra.sweep.dir))
        sweep.mkdir(parents=True, exist_ok=True)
        arguments = [
            (words, "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state())
            for number, words in todo.items()
        ]
        try:
            jobs = submit_array(wanted, folder, self, arguments)
        except ConfigErrors as error:  # in the form that Hydra tells without a traceback
            raise CompactHydraException(str(error)) from None
        placed = {number: (job.job_id, str(log_of(job))) for number, job in zip(todo, jobs, strict=True)}
        self._tell_submitted(sweep, placed)
        if not wanted["wait"]:
            return {number: _returned(words, None) for number, words in todo.items()}
        ended = dict(zip(todo, follow(jobs, wanted["poll_seconds"]), strict=True))
        return {number: self._settle(number, todo[number], ended[number]) for number in todo}

    def _wanted(self) -> dict[str, Any]:
        """The launcher's options, with what the task function asks for."""
        from launchers.slurm.request import merge_options

        request, typed = getattr(self.task_function, "request", {}), getattr(self.task_function, "typed", ())
        return merge_options(self.params, request, typed)

    def _tell_submitted(self, sweep: Path, placed: dict[int, tuple[str, str]]) -> None:
        from launchers.sweeps.book import Book

        Book(sweep).note_jobs(placed)
        arrays = sorted({job.split("_")[0] for job, _ in placed.values()})
        print(f"submitted {len(placed)} elements as job {' '.join(arrays)}", flush=True)
        first = next(iter(placed.values()))[1]
        rows = {
            "log": first,
            "state": f"squeue -j {','.join(arrays)}",
            "cancel": f"scancel {' '.join(arrays)}",
        }
        print("\n".join(f"{name:12}{value}" for name, value in rows.items()), flush=True)

    def _settle(self, number: int, overrides: list[str], ended: Any) -> JobReturn:
        """The element's return; a dead one is told at once, and to the sweep's book where there is one."""
        if ended.error is None:
            return ended.result
        log.error("#%d (%s, %s): %s", number, ended.job, ended.state, ended.error)
        note = getattr(self.task_function, "note_dead", None)
        if note is not None:
            note(number, overrides, ended)
        if getattr(self.task_function, "tolerates_failures", False):
            return _returned(overrides, None)
        done = JobReturn(overrides=overrides, status=JobStatus.FAILED)
        done.return_value = RuntimeError(f"element {number}: {ended.error}; see {ended.log}")
        return done


def _returned(overrides: Sequence[str], value: Any) -> JobReturn:
    done = JobReturn(overrides=list(overrides), status=JobStatus.COMPLETED)
    done.return_value = value
    return done


for _name in ("prl_slurm", "submitit_slurm"):
    ConfigStore.instance().store(group="hydra/launcher", name=_name, node=PrlSlurmConf(), provider="prl")
