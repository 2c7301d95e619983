"""Where a launch executes: on this machine, or as one task of a SLURM job. The rest is the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launchers import placement
from launchers.interrupts import Interrupts
from launchers.local import Outcome, supervise
from launchers.placement import Role
from launchers.run_directory import RunPlan
from prl.run_dir import RunDir

Planner = Callable[[Any], RunPlan]


class Site:
    """This machine. A SLURM task (`launchers.slurm.task.Task`) replaces what differs there."""

    leads = True
    """Whether this process opens the run directory, tracks and tells; the others only run their roles."""

    def plan(self, config: Any, planner: Planner) -> RunPlan:
        """Where the run lives and where it resumes. Raises ValueError."""
        return planner(config)

    def roles(self, command: str, config: Any, run: RunDir) -> list[Role]:
        """The placement of the whole run. Raises ValueError when it does not fit."""
        return placement.place(command, config, run.resolved_config, placement.visible_gpus(os.environ))

    def interrupts(self) -> Interrupts:
        return Interrupts()

    def supervise(
        self,
        roles: list[Role],
        run: RunDir,
        config: Any,
        interrupts: Interrupts,
        on_end: Callable[[], None] = lambda: None,
    ) -> Outcome:
        """Run the roles that belong to this process to the end of the run."""
        return supervise(roles, run, config.cluster.grace, interrupts, on_end)

    def follow(self, path: Path, seconds: float) -> int:
        """The part of a process that does not lead the run in `path`; its exit code.

        `seconds`: how long it waits for the one that leads.
        """
        raise AssertionError("on one machine there is nobody to follow")

    def close(self, outcome: Outcome) -> int:
        """What is left to do when everything else is done; the exit code of the launch."""
        return outcome.code


_current = Site()


def current_site() -> Site:
    """Where this process executes its launches."""
    return _current


def enter_site(site: Site) -> None:
    """Declare where this process executes; called once, before the first launch."""
    global _current
    _current = site
