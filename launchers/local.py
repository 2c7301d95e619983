"""The local supervisor: starts the roles of a placement, watches them, ends all of them.

A run ends well when every job exited 0. It fails as soon as any process dies early; it is killed when the
user or the system asks for it. However it ends, no process of it is left.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from launchers.interrupts import Interrupts
from launchers.placement import Role
from launchers.processes import FAMILY_VAR, descendants, kill_family
from launchers.role import LAUNCHER_VAR
from prl.log_lines import readable
from prl.run_dir import RunDir

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
TAIL_BYTES = 1 << 15
"""Read of the end of a log at least: one JSON line holds a whole traceback."""
GUARD = "guard"
# A tracker's run in the environment would make every process write to that run.
DROPPED_VARS = ("MLFLOW_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

Status = Literal["FINISHED", "FAILED", "KILLED"]


@dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code, its status, why, the roles at fault (first cause first), and when."""

    code: int
    status: Status
    reason: str = ""
    culprits: tuple[str, ...] = ()
    at: float = field(default_factory=time.monotonic, compare=False)


class Peers(Protocol):
    """The rest of a run that is spread over several supervisors."""

    def verdict(self) -> Outcome | None:
        """How the run ended elsewhere, or must end now; None while it goes on."""

    def finished(self) -> bool:
        """Whether the jobs of every other supervisor ended well; asked once those of this one did."""


class Alone:
    """Nobody else takes part."""

    def verdict(self) -> Outcome | None:
        return None

    def finished(self) -> bool:
        return True


@dataclass
class Child:
    """A started role."""

    role: Role
    process: subprocess.Popen[bytes]
    started_at: float
    ready: bool = False
    restarts: int = 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def ending(self) -> str:
        """How the process ended, in words."""
        code = self.process.returncode
        if code < 0:
            return f"was killed by {signal_name(-code)}"
        return f"exited with code {code}" + (" before the run was done" if code == 0 else "")


@dataclass
class Supervisor:
    """Runs `roles` as processes of one run. Use `supervise`."""

    roles: list[Role]
    run: RunDir
    grace: float
    interrupts: Interrupts
    peers: Peers = field(default_factory=Alone)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    children: list[Child] = field(default_factory=list)

    def start(self) -> None:
        """Start every role in order without a pause: whoever needs a peer waits for its address."""
        guard = Role(GUARD, "server", (sys.executable, "-m", "launchers.guard"))
        self.children.append(self._spawn(guard, subprocess.PIPE))
        for role in self.roles:
            if self.interrupts.signum is not None:
                return
            self.children.append(self._spawn(role, subprocess.DEVNULL))

    def watch(self) -> Outcome:
        """Block until the run is done, fails or is interrupted."""
        while True:
            if (ended := self.peers.verdict()) is not None:  # first: it may be why the signal came
                return ended
            if self.interrupts.signum is not None:
                return killed(self.interrupts.signum)
            if early := [child for child in self.children if self._ended_early(child)]:
                if any(child.restarts >= child.role.restarts for child in early):
                    return failed(early)
                for child in early:
                    self._start_again(child)
            if late := self._late():
                return Outcome(
                    1, "FAILED", f"{late.name} was not ready within {late.ready_timeout:.0f} s", (late.name,)
                )
            jobs = [child for child in self.children if child.role.kind == "job"]
            if not any(child.running for child in jobs) and self.peers.finished():
                return self.peers.verdict() or Outcome(0, "FINISHED")
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        """SIGTERM to every role, `grace` seconds, then SIGKILL to all that is left of the whole tree."""
        tree = {process for child in self.children for process in descendants(child.process.pid)}
        roles = [child for child in self.children if child.role.name != GUARD]
        for child in roles:
            if child.running:
                child.process.terminate()
        deadline = time.monotonic() + self.grace
        while any(child.running for child in roles) and time.monotonic() < deadline:
            if self.interrupts.urgent:
                break
            time.sleep(POLL_SECONDS / 4)
        for child in roles:
            if child.running:
                log.warning("%s did not end on SIGTERM and is killed", child.role.name)
        left = kill_family(self.key, tree)  # the guard is of the family too
        for child in self.children:
            if child.process.stdin is not None:
                child.process.stdin.close()
            if child.process.pid not in {process.pid for process in left}:
                child.process.wait()
        if left:
            log.error("could not kill processes %s", sorted(process.pid for process in left))

    def _spawn(self, role: Role, stdin: int) -> Child:
        path = self.run.log_file(role.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        inherited = {key: value for key, value in os.environ.items() if key not in DROPPED_VARS}
        env = {**inherited, **role.env, FAMILY_VAR: self.key, LAUNCHER_VAR: str(os.getpid())}
        with path.open("ab") as out, _warning_blocked():
            process = subprocess.Popen(
                role.argv, env=env, stdin=stdin, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        log.info("%s is process %d", role.name, process.pid)
        return Child(role, process, time.monotonic())

    def _start_again(self, dead: Child) -> None:
        """Replace a dead server. Its address goes first, so that peers wait for that of the new one."""
        limit = dead.role.restarts
        log.warning("%s %s; start %d of %d follows", dead.role.name, dead.ending(), dead.restarts + 1, limit)
        self.run.address_file(dead.role.name).unlink(missing_ok=True)
        child = self._spawn(dead.role, subprocess.DEVNULL)
        child.restarts = dead.restarts + 1
        self.children[self.children.index(dead)] = child

    def _ended_early(self, child: Child) -> bool:
        return not child.running and (child.process.returncode != 0 or child.role.kind == "server")

    def _late(self) -> Role | None:
        for child in self.children:
            if child.ready or child.role.ready_timeout is None:
                continue
            child.ready = self.run.address_file(child.role.name).exists()
            waited = time.monotonic() - child.started_at
            if not child.ready and waited > child.role.ready_timeout:
                return child.role
        return None


def supervise(
    roles: list[Role],
    run: RunDir,
    grace: float,
    interrupts: Interrupts,
    on_end: Callable[[], None] = lambda: None,
    peers: Peers | None = None,
) -> Outcome:
    """Run `roles` to their end. `on_end` is called when it is over, before the clean-up."""
    supervisor = Supervisor(roles, run, grace, interrupts, peers or Alone())
    try:
        supervisor.start()
        outcome = supervisor.watch()
        log.info("%s %s", outcome.status, outcome.reason)
        on_end()
        return outcome
    finally:
        supervisor.stop()


@contextlib.contextmanager
def _warning_blocked() -> Iterator[None]:
    """Whoever is started inside never dies of SLURM's warning, which goes to every process of a step and by
    default kills: a blocked signal stays blocked in all descendants, from their first instruction on."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def failed(early: list[Child]) -> Outcome:
    """Outcome of processes that died within one look: one that was killed made the others fail."""
    early = sorted(early, key=lambda child: child.process.returncode >= 0)
    endings = [f"{child.role.name} {child.ending()}" for child in early]
    return Outcome(1, "FAILED", "; ".join(endings), tuple(child.role.name for child in early))


def killed(signum: int) -> Outcome:
    return Outcome(128 + signum, "KILLED", f"received {signal_name(signum)}")


def signal_name(signum: int) -> str:
    known = {member.value: member.name for member in signal.Signals}
    return known.get(signum, f"signal {signum}")


def tail(path: Path, lines: int = 30, width: int = 400) -> str:
    """The last lines of a log file as text, long ones cut; reads no more than the end of the file."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - max(lines * width, TAIL_BYTES)))
        text = file.read().decode(errors="replace").splitlines()
    return "\n".join(line[:width] for line in readable(text[-lines:])[-lines:])
