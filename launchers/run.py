"""`prl rl` and `prl sft` from a checked config to an exit code: plan, place, supervise, tell."""

from __future__ import annotations

import contextlib
import logging
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from launchers.dry_run import configuration, placement_report
from launchers.interrupts import Interrupts
from launchers.local import Outcome
from launchers.placement import Role
from launchers.run_directory import RunPlan, append_status, open_run, plan_run
from launchers.site import Site, current_site
from launchers.summary import failure_report, summary
from launchers.sweep import sweep_directory, task_overrides
from prl.algo.base import import_own_algorithms
from prl.config.describe import describe_plan
from prl.config.identity import run_path
from prl.config.loss import CustomLossConfig
from prl.config.schema import LogConfig
from prl.dashboard.daemon import offer
from prl.import_path import require_object
from prl.log_lines import OWN, formatter, level_of
from prl.monitor.companions import companions
from prl.run_dir import RunDir
from prl.tracking.board import Board
from prl.tracking.display import Display
from prl.tracking.mlflow_run import Facts
from prl.tracking.mlflow_store import Store, find_store
from prl.tracking.mlflow_writer import MlflowWriter
from prl.tracking.terminal import announce

REFUSED = 2
FLUSH_SECONDS = {"FINISHED": 120.0, "FAILED": 6.0, "KILLED": 15.0}
"""How long after its end a run waits for the tracker to take what is left, by how it ended."""


def launch_rl(config: Any, command_line: str | list[str]) -> int:
    """Run `prl rl` to its end; the exit code (0 done, 1 failed, 2 refused, 128 + signal when stopped)."""
    return launch("rl", config, command_line)


def launch_sft(config: Any, command_line: str | list[str]) -> int:
    """Run `prl sft` to its end; exit codes as `launch_rl`."""
    return launch("sft", config, command_line)


def launch(command: str, config: Any, command_line: str | list[str]) -> int:
    """Plan, and unless it is a dry run, make the run directory and run every role of the placement.

    `command_line`: the words of the command, or the command as typed in a shell.
    """
    words = shlex.split(command_line) if isinstance(command_line, str) else command_line
    site = current_site()
    if not site.leads:
        return site.follow(run_path(config).expanduser().resolve(), config.cluster.start_timeout)
    try:
        plan = site.plan(config, plan_run)
        roles = site.roles(command, config, RunDir(plan.path))
        if command == "rl":
            import_own_algorithms(config)
            if isinstance(config.loss, CustomLossConfig):
                require_object(config.loss.import_path, "loss.import_path")
    except ValueError as error:
        return _refuse(error)
    if config.dry_run:
        print(configuration(command, config))
    told = "\n".join([describe_plan(config), f"devices      {_devices(roles)}", plan.origin()])
    if config.dry_run:
        print(told)
        print(placement_report(config, roles))
        return 0
    announce(config.log, told)
    if config.max_steps is not None and plan.resume_step >= config.max_steps:
        print(f"{plan.path} is at step {plan.resume_step} of {config.max_steps}: there is nothing to do")
        return 0
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(site.interrupts())
        try:
            run = stack.enter_context(open_run(command, config, plan, words))
        except (ValueError, OSError) as error:  # taken meanwhile, or not writable
            return _refuse(error)
        stack.enter_context(launcher_log(run, config.log))
        stack.enter_context(companions(config, run))
        return Attempt(command, config, plan, run, words, interrupts, site).execute()


@dataclass
class Attempt:
    """One launch at a run whose directory is open."""

    command: str
    config: Any
    plan: RunPlan
    run: RunDir
    command_line: list[str]
    interrupts: Interrupts
    site: Site

    def execute(self) -> int:
        """Run the roles with everything around them; the exit code."""
        append_status(self.run, "started", [self.plan.origin()])
        roles = self.site.roles(self.command, self.config, self.run)
        log = self.config.log
        display = Display(log.display, self.run.metrics, self.config.max_steps, form=log.format)
        display.start()
        display.note(f"starting {', '.join(role.name for role in roles)}; logs in {self.run.logs}")
        offer(self.config.monitor.dashboard, self.run.path.parent, display.note)
        store = self._store()
        writer = self._start_writer(store, display.note)
        outcome = Outcome(1, "FAILED", "the launcher itself failed")
        try:
            hurry = writer.hurry if writer else lambda: None
            outcome = self.site.supervise(roles, self.run, self.config, self.interrupts, hurry)
        finally:
            display.close()
            self._tell_failure(outcome)
            if writer:
                patience = FLUSH_SECONDS[outcome.status] - (time.monotonic() - outcome.at)
                writer.close(outcome.status, max(1.0, patience), self.interrupts.since_now())
        self._tell_end(outcome, display.board, store)
        return self.site.close(outcome)

    def _store(self) -> Store | None:
        tracking = self.config.tracking
        return find_store(tracking.uri, self.plan.path.parent) if tracking.name == "mlflow" else None

    def _start_writer(self, store: Store | None, say: Callable[[str], None]) -> MlflowWriter | None:
        if store is None:
            return None
        overrides = task_overrides(self.command_line)
        facts = Facts(self.run, self.command, self.config, overrides, sweep_directory())
        writer = MlflowWriter(facts, store, say)
        writer.start()
        return writer

    def _tell_failure(self, outcome: Outcome) -> None:
        if outcome.status == "FAILED":
            announce(self.config.log, failure_report(outcome, self.run), sys.stderr)

    def _tell_end(self, outcome: Outcome, board: Board, store: Store | None) -> None:
        text = summary(outcome, self.run, self.plan, board, store.ui_command if store else None)
        announce(self.config.log, text)
        note_end(self.config, self.run, outcome, [f"step {board.trained_step}"])


def note_end(config: Any, run: RunDir, outcome: Outcome, notes: list[str]) -> None:
    """Close the attempt's entry in STATUS.md. A full disk must not hide how the run ended."""
    try:
        append_status(run, f"ended: {outcome.status}", [outcome.reason, *notes])
    except OSError as error:
        announce(config.log, f"STATUS.md lacks this end: {error}", sys.stderr)


def _refuse(error: Exception) -> int:
    print(error, file=sys.stderr)
    return REFUSED


def _devices(roles: list[Role]) -> str:
    """`inference 0, trainer/0 1`, or `cpu`."""
    placed = [f"{role.name} on GPU {','.join(role.devices)}" for role in roles if role.devices]
    return ", ".join(placed) or "cpu"


@contextlib.contextmanager
def launcher_log(run: RunDir, log: LogConfig) -> Iterator[None]:
    """The launcher's own log file, beside those of the roles; the tracker's complaints go there too."""
    handler = logging.FileHandler(run.log_file("launcher"))
    handler.setFormatter(formatter(log, "launcher"))
    loggers = [logging.getLogger(name) for name in (*OWN, "mlflow", "alembic", "urllib3")]
    for logger in loggers:
        logger.setLevel(level_of(log, "launcher") if logger.name in OWN else logging.WARNING)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)
        handler.close()
