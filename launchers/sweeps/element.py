"""One element of a sweep, as the function that Hydra calls: here, in a process beside, or in a SLURM task."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launchers.site import current_site
from launchers.sweep import ARRAY_VAR, SWEEP_VAR
from launchers.sweeps.book import Book, Record
from launchers.sweeps.objective import objective_of
from prl.config.command_line import CommandLine

INTERRUPTED = (130, 143)
"""Exit codes of a run that Ctrl-C or SIGTERM ended: the rest of its sweep shall not start."""

Job = Callable[[Any, Sequence[str]], int]


@dataclass
class Element:
    """Called by Hydra with the element's config, which it ignores: prl composes and checks its own.

    `request`: launcher parameters of `cluster`; `typed`: those among them that the user set by hand.
    `seconds`: what the tasks that do not lead wait for the one that does. `job` does not travel: a task of
    another machine takes the command's own.
    """

    line: CommandLine
    sweep: Path
    seconds: float
    job: Job | None = None
    request: Mapping[str, Any] = field(default_factory=dict)
    typed: frozenset[str] = frozenset()
    interrupted: int | None = None

    tolerates_failures = True
    """A failed element is told in the table at the end; it is no reason to hide the others."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "job": None}

    def __call__(self, _: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        number, overrides = int(hydra.job.num), list(hydra.overrides.task)
        if (known := Book(self.sweep).of(number)) is not None and known.finished:
            return known.objective
        if ARRAY_VAR in os.environ:
            return self._in_array(number, overrides)
        code = self._launch(self.words(overrides, number))
        if code in INTERRUPTED:
            self.interrupted = code
            raise KeyboardInterrupt
        return self.note(number, overrides, code)

    def words(self, overrides: Sequence[str], number: int) -> list[str]:
        """The command line that runs this element alone, or goes on with it."""
        from prl.config.hydra_app import own_flags, place_of

        searchpath = [word for word in self.line.overrides if word.startswith("hydra.searchpath=")]
        where = place_of(self.sweep / str(number))
        again = going_on(self.sweep / str(number), self.line.command)
        return [self.line.command, *own_flags(self.line), *searchpath, *overrides, *where, *again]

    def note(
        self,
        number: int,
        overrides: Sequence[str],
        code: int,
        *,
        job: str | None = None,
        log: str | None = None,
        state: str | None = None,
    ) -> float | None:
        """Record how the element ended; its objective."""
        found = objective_of(self.sweep / str(number))
        value = found[1] if found else None
        Book(self.sweep).record(Record(number, list(overrides), code, value, job, log, state))
        return value

    def note_dead(self, number: int, overrides: Sequence[str], ended: Any) -> None:
        """Record an element whose task could not do it itself (`launchers.slurm.array.Ended`)."""
        if Book(self.sweep).of(number) is None:
            self.note(number, overrides, 1, job=ended.job, log=str(ended.log), state=ended.state)

    def finished(self, number: int) -> Record | None:
        """The record of an element that need not run (again)."""
        record = Book(self.sweep).of(number)
        return record if record is not None and record.finished else None

    def _in_array(self, number: int, overrides: list[str]) -> float | None:
        """This task's part of the element. Raises SystemExit for SLURM when it did not end well."""
        import submitit

        from launchers.slurm.job import enter_task
        from launchers.slurm.task import REQUEUED
        from launchers.sweeps.tell import tell_if_last

        os.environ[SWEEP_VAR] = str(self.sweep)
        if self.request:  # not where only Hydra's launcher was chosen: the run is then local to one node
            enter_task()
        site = current_site()
        if not site.leads:
            leave(site.follow(self.sweep / str(number), self.seconds))
            return None
        code = self._launch(self.words(overrides, number))
        if code == REQUEUED:
            leave(code)
        env = submitit.JobEnvironment()
        value = self.note(number, overrides, code, job=env.job_id, log=str(env.paths.stdout))
        tell_if_last(Book(self.sweep))
        leave(code)
        return value

    def _launch(self, words: list[str]) -> int:
        from prl.__main__ import job_of
        from prl.config.command_line import parse
        from prl.config.hydra_app import compose_element

        line = parse(words, [self.line.command])
        config = compose_element(line, line.overrides)
        return (self.job or job_of(line.command))(config, words)


def going_on(run: Path, command: str) -> list[str]:
    """Overrides by which an element that was begun and did not finish goes on where it can."""
    from launchers.run_directory import is_run
    from prl.checkpoint.retention import complete_steps

    if not is_run(run):
        return []
    kept = command == "eval" or complete_steps(run / "checkpoints")
    return ["run.resume=latest"] if kept else ["run.clean=true"]


def leave(code: int) -> None:
    """End the task with `code` where it is not 0; SystemExit passes through Hydra and submitit."""
    if code:
        raise SystemExit(code)
