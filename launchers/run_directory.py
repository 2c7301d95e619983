"""The run directory's life: reuse rules, attempts, and what a resume makes stale.

`plan_run` only looks and refuses; `open_run` writes, below the run's own directory and nowhere else, and
holds a lock on it for as long as the launcher lives.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.initial_model import settle_initial_model
from prl.checkpoint.marker import read_step
from prl.checkpoint.resolve import resolve_resume
from prl.checkpoint.retention import complete_steps, set_aside
from prl.config.errors import ConfigErrors
from prl.config.load import dump_resolved, load_resolved
from prl.config.rules_training import schedule_fits_the_rest
from prl.run_dir import POLL_SECONDS, RunDir
from prl.tracking.reader import append_attempt_marker

LOCK_FILE = ".lock"
BEFORE_RUN = (LOCK_FILE, "slurm")
"""What may be in a directory before any run is: the lock, and what submitting a job left."""


@dataclass(frozen=True)
class RunPlan:
    """What a launch will do, and to which directory. `resume_step` is 0 when it starts from scratch.

    `patience`: seconds that it waits for the run's lock.
    """

    path: Path
    checkpoints: Path
    checkpoint: Path | None
    resume_step: int
    clean: bool
    patience: float = 0.0

    @property
    def continues(self) -> bool:
        """Whether the run directory holds earlier attempts of the same run."""
        return not self.clean and is_run(self.path)

    def origin(self) -> str:
        if self.checkpoint is None:
            return "starts from scratch"
        return f"resumes from step {self.resume_step}: {self.checkpoint}"


def plan_run(config: Any) -> RunPlan:
    """Where a run lives and where it resumes; writes nothing.

    Raises ValueError when the name is taken (and neither resumed nor cleaned), when there is nothing to
    resume, when a schedule that starts anew does not fit into the steps that are left, or when cleaning would
    delete something that is not a run below `output_dir`.
    """
    path = _absolute(config.output_dir) / config.run.name
    checkpoints = _absolute(config.ckpt.dir) if config.ckpt.dir else RunDir(path).checkpoints
    checkpoint = resolve_resume(config.run.resume, checkpoints)
    if checkpoint is not None:
        checkpoint = checkpoint.resolve()
    step = read_step(checkpoint) if checkpoint else 0
    if problems := list(schedule_fits_the_rest(config, step)):
        raise ConfigErrors(problems)
    plan = RunPlan(path, checkpoints, checkpoint, step, config.run.clean)
    _check_checkpoints(plan)
    if _occupied(path):
        _check_cleanable(plan) if plan.clean else _check_continues(plan)
    return plan


def plan_by_name(config: Any) -> RunPlan:
    """Where a run without checkpoints (an evaluation) lives; `run.resume` goes on with the one of its name.

    Writes nothing. Raises ValueError as `plan_run`.
    """
    path = _absolute(config.output_dir) / config.run.name
    plan = RunPlan(path, RunDir(path).checkpoints, None, 0, config.run.clean)
    if not _occupied(path):
        if config.run.resume:
            raise ValueError(f"run.resume = latest: there is no run {path}; leave run.resume out to start it")
    elif plan.clean:
        _check_cleanable(plan)
    elif not is_run(path) or not config.run.resume:
        more = "Choose"
        if is_run(path):
            more = "Continue it by run.resume=latest, replace it by run.clean=true, or choose"
        raise ValueError(f"run.name = {path.name}: {path} exists. {more} another run.name.")
    return plan


def plan_again(config: Any, planner: Callable[[Any], RunPlan]) -> RunPlan:
    """The plan of a job that SLURM started anew: the run of its first start goes on where it was.

    That is its newest complete checkpoint, with all of its state: `ckpt.skip_*` were for the checkpoint that
    the run began from. Without one, it is where its first start began. Raises ValueError.
    """
    config.run.clean = False
    path = _absolute(config.output_dir) / config.run.name
    if not is_run(path):
        return planner(config)
    if not hasattr(config, "ckpt"):
        config.run.resume = "latest"
        return planner(config)
    checkpoints = _absolute(config.ckpt.dir) if config.ckpt.dir else RunDir(path).checkpoints
    if complete_steps(checkpoints):
        config.run.resume = "latest"
    elif config.run.resume == "latest":
        config.run.resume = None
    checkpoint = resolve_resume(config.run.resume, checkpoints)
    if checkpoint is None:
        return RunPlan(path, checkpoints, None, 0, clean=False)
    checkpoint = checkpoint.resolve()
    _skip_once(config, checkpoint, path / "configs" / "latest" / "resolved.yaml")
    return RunPlan(path, checkpoints, checkpoint, read_step(checkpoint), clean=False)


def _skip_once(config: Any, checkpoint: Path, last_start: Path) -> None:
    """Of `ckpt.skip_*` what the start before skipped, if it began from the same checkpoint; else nothing."""
    if not last_start.is_file():
        return
    _, before = load_resolved(last_start)
    again = before.run.resume == str(checkpoint)
    for skip in ("skip_optimizer", "skip_scheduler", "skip_progress"):
        setattr(config.ckpt, skip, again and getattr(before.ckpt, skip))


@contextlib.contextmanager
def open_run(command: str, config: Any, plan: RunPlan, command_line: list[str]) -> Iterator[RunDir]:
    """Make the next attempt of the planned run and hold the run's lock until the block ends.

    `config` gets what is now settled: absolute directories and the checkpoint to resume from.
    Raises ValueError if another launch was quicker or still runs.
    """
    continues = plan.continues
    if plan.clean and plan.path.exists():
        _delete_run(plan.path)
    plan.path.mkdir(parents=True, exist_ok=True)
    with _locked(plan.path, plan.patience):
        if not continues and _occupied(plan.path):
            raise ValueError(f"run.name = {plan.path.name}: another launch has just taken {plan.path}")
        if command in ("rl", "sft"):
            settle_initial_model(config, RunDir(plan.path))
        run = _new_attempt(plan.path)
        config.output_dir = str(plan.path.parent)
        if hasattr(config, "ckpt"):
            config.ckpt.dir = str(plan.checkpoints) if config.ckpt.dir else None
        config.run.resume = str(plan.checkpoint) if plan.checkpoint else None
        if continues:
            _set_aside_newer(run, plan)
        run.resolved_config.write_text(dump_resolved(command, config))
        (run.configs / "command.txt").write_text(_describe_command(command_line))
        _point_latest(run.logs)
        _point_latest(run.configs)
        yield run


def is_run(path: Path) -> bool:
    """Whether some launch made a run of the directory `path`."""
    return any((path / "configs").glob("attempt_*"))


def append_status(run: RunDir, event: str, notes: list[str]) -> None:
    """Add a dated entry to the run's STATUS.md; earlier ones are never changed. Empty notes are left out."""
    path = run.path / "STATUS.md"
    head = "" if path.exists() else f"# {run.path.name}\n"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    entry = "".join(f"- {note}\n" for note in notes if note)
    with path.open("a") as file:
        file.write(f"{head}\n## {stamp}: attempt {run.attempt} {event}\n\n{entry}")


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _occupied(path: Path) -> bool:
    """Something is there. An empty directory, or one that a launch left before it made anything, is free."""
    return path.exists() and (
        not path.is_dir() or any(entry.name not in BEFORE_RUN for entry in path.iterdir())
    )


def _check_checkpoints(plan: RunPlan) -> None:
    """A run from scratch would mix its checkpoints with those of another."""
    elsewhere = plan.path not in plan.checkpoints.parents
    if plan.checkpoint is None and elsewhere and complete_steps(plan.checkpoints):
        raise ValueError(
            f"ckpt.dir = {plan.checkpoints}: it holds checkpoints of another run. "
            "Resume one of them by run.resume=..., or choose another ckpt.dir."
        )


def _check_continues(plan: RunPlan) -> None:
    name, path = plan.path.name, plan.path
    if plan.checkpoint is None:
        raise ValueError(
            f"run.name = {name}: {path} exists. "
            "Continue it by run.resume=latest, replace it by run.clean=true, or choose another run.name."
        )
    if not is_run(path):
        raise ValueError(f"run.name = {name}: {path} exists and is not a run. Choose another run.name.")
    if plan.checkpoint.parent != plan.checkpoints:
        raise ValueError(
            f"run.resume = {plan.checkpoint}: this checkpoint is not of the run {path}, which exists. "
            "Choose a new run.name for the fork, or replace the run by run.clean=true."
        )


def _check_cleanable(plan: RunPlan) -> None:
    path, fault = plan.path, None
    if path.is_symlink() or path.resolve().parent != path.parent:
        fault = f"{path} does not lie in output_dir ({path.parent})"
    elif not is_run(path):
        fault = f"{path} is not a run (it has no configs/attempt_1)"
    elif plan.checkpoint and path in plan.checkpoint.parents:
        fault = f"it would delete the checkpoint to resume from, {plan.checkpoint}"
    if fault:
        raise ValueError(f"run.clean = true: {fault}. Nothing was deleted; choose another run.name.")


def _delete_run(path: Path) -> None:
    """Moved away first, so that no half-deleted run is ever seen under its name."""
    doomed = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.deleting")
    with _locked(path):
        path.rename(doomed)
    shutil.rmtree(doomed)


@contextlib.contextmanager
def _locked(path: Path, patience: float = 0.0) -> Iterator[None]:
    """The run's lock; the system releases it however this process ends."""
    deadline = time.monotonic() + patience
    with (path / LOCK_FILE).open("a") as lock:
        while not _take(lock.fileno()):
            if time.monotonic() >= deadline:
                raise ValueError(f"run.name = {path.name}: another launcher is at work in {path}")
            time.sleep(POLL_SECONDS)
        yield


def _take(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _new_attempt(path: Path) -> RunDir:
    """The next free attempt number; making its directory is the claim."""
    taken = [int(entry.name.removeprefix("attempt_")) for entry in path.glob("*/attempt_*")]
    attempt = max(taken, default=0) + 1
    while True:
        run = RunDir(path, attempt)
        try:
            run.configs.mkdir(parents=True)
        except FileExistsError:
            attempt += 1
            continue
        run.logs.mkdir(parents=True)
        return run


def _set_aside_newer(run: RunDir, plan: RunPlan) -> None:
    """Weights in flight are gone with the processes that knew them; what follows the resume step is void."""
    if run.broadcasts.exists():
        shutil.rmtree(run.broadcasts)
    set_aside(plan.checkpoints, plan.resume_step)
    for stream in sorted(run.metrics.glob("*.jsonl")):
        append_attempt_marker(stream, run.attempt, plan.resume_step)


def _point_latest(attempt: Path) -> None:
    """`latest` beside `attempt` points at it; readers see the old link or the new one."""
    temporary = attempt.with_name(f".latest.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(attempt.name)
    temporary.replace(attempt.with_name("latest"))


def _describe_command(command_line: list[str]) -> str:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    return f"{shlex.join(command_line)}\n# {stamp}, {socket.gethostname()}, in {Path.cwd()}\n"
