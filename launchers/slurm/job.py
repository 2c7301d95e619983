"""What every task of a job executes, one a node."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import yaml

from launchers.site import enter_site
from launchers.slurm.task import Task
from prl.config.load import build
from prl.config.schema import JOBS


def run_job(command: str, resolved: str, words: list[str]) -> None:
    """Run `prl command` with the config that was submitted, as this task's part of the job.

    `resolved`: text of `dump_resolved`. Raises SystemExit when it did not end well: SLURM must see that, and
    submitit turns any other exception into a result of its own.
    """
    enter_task()
    from prl.__main__ import job_of

    tree = yaml.safe_load(resolved)
    tree.pop("command")
    leave_with(job_of(command), build(JOBS[command], tree), words)


def enter_task() -> None:
    """From here on this process is a task of the job that it runs in."""
    enter_site(Task.from_environment())


def leave_with(job: Callable[[Any, list[str]], int], config: Any, words: list[str]) -> None:
    code = job(config, words)
    sys.stdout.flush()
    if code:
        raise SystemExit(code)
