"""A dead server that may be started again is; when its starts are used up, the run ends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from launchers.interrupts import Interrupts
from launchers.local import Outcome, Supervisor
from launchers.placement import Role
from prl.run_dir import RunDir

Make = Callable[..., Role]


def watched(supervisor: Supervisor) -> tuple[threading.Thread, list[Outcome]]:
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.append(supervisor.watch()), daemon=True)
    thread.start()
    return thread, outcomes


def pid_of(supervisor: Supervisor, name: str) -> int:
    return next(child.process.pid for child in supervisor.children if child.role.name == name)


def test_a_server_is_started_again_until_its_restarts_are_used_up(
    run: RunDir, role: Make, interrupts: Interrupts, wait_until: Callable[..., None]
) -> None:
    roles = [role("env/x", "server", "serve", restarts=1), role("orchestrator", "job", "work", "60")]
    supervisor = Supervisor(roles, run, 5.0, interrupts)
    supervisor.start()
    thread, outcomes = watched(supervisor)
    first = pid_of(supervisor, "env/x")
    run.publish_address("env/x", "tcp://127.0.0.1:1")
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: pid_of(supervisor, "env/x") != first)
    assert not run.address_file("env/x").exists(), "peers must not find the dead server's address"
    assert outcomes == [] and thread.is_alive()
    os.kill(pid_of(supervisor, "env/x"), signal.SIGKILL)
    thread.join(20)
    supervisor.stop()
    assert outcomes[0].status == "FAILED" and outcomes[0].culprits == ("env/x",)
    assert len(supervisor.children) == 3, "the guard and the two roles, each once"


def test_a_peer_without_restarts_that_dies_too_ends_the_run(
    run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    roles = [
        role("env/x", "server", "serve", restarts=5),
        role("inference", "server", "serve"),
        role("orchestrator", "job", "work", "60"),
    ]
    supervisor = Supervisor(roles, run, 5.0, interrupts)
    supervisor.start()
    for name in ("env/x", "inference"):
        os.kill(pid_of(supervisor, name), signal.SIGKILL)
    for child in supervisor.children:
        if child.role.name in ("env/x", "inference"):
            child.process.wait(10)
    outcome = supervisor.watch()
    supervisor.stop()
    assert outcome.status == "FAILED" and "inference" in outcome.culprits
