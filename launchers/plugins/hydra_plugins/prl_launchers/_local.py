"""Hydra launcher `prl_local`: elements of a sweep side by side on this machine, each in a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PrlLocalConf:
    """`jobs`: elements at the same time."""

    _target_: str = "hydra_plugins.prl_launchers._local.PrlLocalLauncher"
    jobs: int = 2


class PrlLocalLauncher(Launcher):
    """Needs prl's own task function: it knows the command line of an element."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.task_function: Any = task_function

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        from launchers.sweeps.side_by_side import run_all

        numbered = {initial_job_idx + i: list(overrides) for i, overrides in enumerate(job_overrides)}
        values = run_all(self.task_function, numbered, self.jobs)
        returned = []
        for number, overrides in numbered.items():
            done = JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
            done.return_value = values[number]
            returned.append(done)
        return returned


ConfigStore.instance().store(group="hydra/launcher", name="prl_local", node=PrlLocalConf(), provider="prl")
