"""How the tasks of one job end together: the leader's and the followers' views, without SLURM."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers.interrupts import Interrupts
from launchers.local import Outcome, supervise
from launchers.processes import is_alive
from launchers.run_directory import open_run, plan_again, plan_by_name, plan_run
from launchers.site import Site, current_site
from launchers.slurm.network import address_towards, interface_of
from launchers.slurm.peers import Follower, Leader, NodeFiles
from launchers.slurm.task import Allocation, Task
from prl.checkpoint import stop
from prl.config.cluster import SlurmConfig
from prl.config.load import load_resolved
from prl.config.schema import RlConfig
from prl.config.training import CkptConfig
from prl.run_dir import RunDir


@pytest.fixture
def leader(run: RunDir, interrupts: Interrupts) -> Callable[..., Leader]:
    def make(others: tuple[int, ...] = (), stoppable: bool = True, **cluster: object) -> Leader:
        return Leader(NodeFiles(run), SlurmConfig(**cluster), interrupts, others, run, stoppable)  # type: ignore[arg-type]

    return make


def test_the_leader_waits_for_the_jobs_of_other_nodes(run: RunDir, leader: Callable[..., Leader]) -> None:
    found = leader((1, 2))
    assert not found.finished() and found.verdict() is None
    for node in (1, 2):
        assert not found.finished()
        assert Follower(NodeFiles(run), node).finished() is False, "it ends with the leader, not before"
    assert found.finished()


def test_the_first_failure_anywhere_is_the_cause(run: RunDir, leader: Callable[..., Leader]) -> None:
    found, files = leader((1, 2)), NodeFiles(run)
    for node, name in ((2, "trainer/1"), (1, "orchestrator")):
        Follower(files, node).tell_failure(Outcome(1, "FAILED", f"{name} died", (name,)), patience=0.0)
        time.sleep(0.01)
    assert found.verdict() == Outcome(1, "FAILED", "trainer/1 died", ("trainer/1",))


def test_a_follower_ends_as_the_leader_says(run: RunDir) -> None:
    follower = Follower(NodeFiles(run), 1)
    assert follower.verdict() is None
    NodeFiles(run).tell_end(Outcome(1, "FAILED", "trainer/0 died"))
    ended = follower.verdict()
    assert ended is not None and (ended.code, ended.status) == (1, "FAILED") and ended.culprits == ()
    NodeFiles(run).tell_end(Outcome(0, "FINISHED"))
    ended = follower.verdict()
    assert ended is not None and ended.code == 0


def test_a_follower_that_was_ended_by_the_leader_tells_no_failure_of_its_own(run: RunDir) -> None:
    Follower(NodeFiles(run), 1).tell_failure(Outcome(1, "FAILED", "node 0: x"), patience=60.0)
    assert not NodeFiles(run).of_node(1).exists()


def test_the_leaders_exit_code_decides_once_it_told_the_end(run: RunDir) -> None:
    """Any other task that fails makes srun end the leader, which still tracks, tells and requeues."""
    follower, ended = Follower(NodeFiles(run), 1), Outcome(1, "KILLED", "node 0: warned by SLURM")
    assert follower.exit_code(ended) == 1, "nobody else tells SLURM"
    NodeFiles(run).tell_end(ended)
    assert follower.exit_code(ended) == 0


def test_a_warning_asks_for_a_checkpoint_and_ends_the_run_when_it_is_there(
    run: RunDir, leader: Callable[..., Leader], interrupts: Interrupts
) -> None:
    found = leader()
    interrupts.warned = True
    assert found.verdict() is None and stop.is_requested(run) and not found.stopped
    stop.tell_stopped(run, 7)
    ended = found.verdict()
    assert ended is not None and ended.status == "KILLED" and "checkpoint of step 7" in ended.reason
    assert found.stopped


def test_a_warning_is_not_waited_for_beyond_its_time(
    leader: Callable[..., Leader], interrupts: Interrupts
) -> None:
    found = leader(signal_delay=1)
    interrupts.warned = True
    assert found.verdict() is None
    deadline = time.monotonic() + 20
    while (ended := found.verdict()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended is not None and "no checkpoint was made in time" in ended.reason and found.stopped


def test_an_evaluation_stops_at_once(leader: Callable[..., Leader], interrupts: Interrupts) -> None:
    found = leader(stoppable=False)
    interrupts.warned = True
    ended = found.verdict()
    assert ended is not None and "what is done is kept" in ended.reason


def test_the_watchdog_looks_at_the_trainers_stream(run: RunDir, leader: Callable[..., Leader]) -> None:
    found = leader(step_timeout=0.3)
    stream = run.metric_file("trainer")
    stream.parent.mkdir(parents=True)
    for _ in range(3):
        with stream.open("a") as file:
            file.write("{}\n")
        assert found.verdict() is None
    deadline = time.monotonic() + 20
    while (ended := found.verdict()) is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert ended is not None and ended.culprits == ("trainer/0",) and "step_timeout = 0.3" in ended.reason
    assert leader(step_timeout=None).verdict() is None


def test_a_supervisor_ends_its_roles_when_a_peer_says_so(
    run: RunDir, role: Callable, interrupts: Interrupts
) -> None:
    NodeFiles(run).tell_end(Outcome(1, "FAILED", "elsewhere"))
    children = set(psutil.Process().children())
    outcome = supervise(
        [role("a", "server", "serve"), role("b", "job", "work", "600")],
        run,
        5.0,
        interrupts,
        peers=Follower(NodeFiles(run), 1),
    )
    assert outcome.reason == "node 0: elsewhere" and set(psutil.Process().children()) == children


def test_no_process_of_a_run_dies_of_the_warning(
    run: RunDir, role: Callable, interrupts: Interrupts, wait_until: Callable
) -> None:
    """It may come before a process has set up anything, and to processes that know nothing of it."""

    class Warned:
        done = False

        def verdict(self) -> Outcome | None:
            found = [p for p in psutil.Process().children(recursive=True) if is_alive(p)]
            for process in found:
                os.kill(process.pid, signal.SIGUSR2)
            return None

        def finished(self) -> bool:
            return True

    assert supervise([role("b", "job", "work", "0.5")], run, 5.0, interrupts, peers=Warned()).code == 0


def test_the_address_towards_this_machine_is_its_loopback() -> None:
    address = address_towards("127.0.0.1")
    assert address == "127.0.0.1" and interface_of(address) == "lo" and interface_of("203.0.113.9") is None
    assert socket.gethostbyname("localhost") == address


def test_a_requeued_run_goes_on_from_its_newest_checkpoint(
    config: Callable[..., RlConfig], checkpoint: Callable, tmp_path: Path
) -> None:
    path = tmp_path / "outputs" / "r"
    with open_run("rl", config(), plan_run(config()), ["prl"]):
        pass
    with pytest.raises(ValueError, match="exists"):
        plan_run(config())
    scratch = plan_again(config(run_clean=True), plan_run)
    assert (scratch.checkpoint, scratch.resume_step, scratch.clean) == (None, 0, False)
    for step in (2, 4):
        checkpoint(path / "checkpoints", step)
    again = plan_again(config(), plan_run)
    assert (again.resume_step, again.checkpoint) == (4, path / "checkpoints" / "step_4")
    with open_run("rl", config(), again, ["prl"]) as run:
        assert run.attempt == 2


def test_what_a_resume_skips_is_skipped_once_although_the_job_is_requeued(
    config: Callable[..., RlConfig], checkpoint: Callable, tmp_path: Path
) -> None:
    """Until the run has a checkpoint of its own it begins as it was asked to."""
    skips = ("skip_optimizer", "skip_scheduler", "skip_progress")
    source = checkpoint(tmp_path / "other" / "checkpoints", 3)

    def job() -> RlConfig:
        asked = CkptConfig(skip_optimizer=True, skip_scheduler=True)
        return config(run_resume=str(source), ckpt=asked, max_steps=100)

    def start(plan_of: Callable[[RlConfig], Any]) -> tuple[int, list[bool]]:
        made = job()
        plan = plan_of(made)
        with open_run("rl", made, plan, ["prl"]) as run:
            resolved = load_resolved(run.resolved_config)[1]
        return plan.resume_step, [getattr(resolved.ckpt, skip) for skip in skips]

    def requeue() -> tuple[int, list[bool]]:
        return start(lambda made: plan_again(made, plan_run))

    assert start(plan_run) == (3, [True, True, False])
    assert requeue() == (3, [True, True, False])
    checkpoint(tmp_path / "outputs" / "r" / "checkpoints", 7)
    assert requeue() == (7, [False] * 3)
    assert requeue() == (7, [False] * 3), "the job's own words still ask for it"


def test_a_job_that_never_began_starts_as_planned_although_its_log_is_there(
    config: Callable[..., RlConfig], tmp_path: Path
) -> None:
    (tmp_path / "outputs" / "r" / "slurm" / "12").mkdir(parents=True)
    assert plan_run(config()).resume_step == 0
    assert plan_again(config(), plan_run).continues is False
    assert plan_by_name(config()).continues is False


def test_a_task_is_a_site_that_notes_signals_from_its_first_moment() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    try:
        task = Task(Allocation("9_1", 10, 1, ("a", "b")))
        assert not task.leads and type(current_site()) is Site
        os.kill(os.getpid(), signal.SIGUSR2)
        assert task.interrupts().warned and task.interrupts().signum is None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def task() -> Iterator[Callable[[int], Task]]:
    """A leading task of the given restart; the signals are those of before again at the end."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield lambda restarts: Task(Allocation("9", 9, 0, ("a",), restarts))
    for number, handler in before.items():
        signal.signal(number, handler)


def test_slurms_own_restarts_count_as_well(
    config: Callable[..., RlConfig], task: Callable[[int], Task]
) -> None:
    """Without a warning, after the loss of a node, SLURM requeues by itself."""
    asked = config(cluster=SlurmConfig(max_requeues=2))
    assert task(0).plan(asked, plan_run).patience == 0.0
    assert task(2).plan(asked, plan_run).patience > 90.0, "the lock of a lost node on a file server"
    with pytest.raises(ValueError, match=r"cluster\.max_requeues = 2: used up by start 3"):
        task(3).plan(asked, plan_run)


def test_a_later_start_waits_for_the_lock_of_the_one_before(
    config: Callable[..., RlConfig], checkpoint: Callable, tmp_path: Path
) -> None:
    with open_run("rl", config(), plan_run(config()), ["prl"]) as run:
        checkpoint(run.checkpoints, 2)
        plan = replace(plan_again(config(), plan_run), patience=0.3)
        with (
            pytest.raises(ValueError, match="another launcher is at work"),
            open_run("rl", config(), plan, ["prl"]),
        ):
            pass
        held = run.path / ".lock"
    with held.open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Timer(0.5, fcntl.flock, (lock, fcntl.LOCK_UN)).start()
        with open_run("rl", config(), replace(plan, patience=60.0), ["prl"]) as again:
            assert again.attempt > 1


def test_a_stop_is_asked_for_and_answered_in_one_attempt(run: RunDir) -> None:
    assert not stop.is_requested(run) and stop.stopped_at(run) is None
    stop.request(run)
    stop.tell_stopped(run, 3)
    assert stop.is_requested(run) and stop.stopped_at(run) == 3
    assert not stop.is_requested(RunDir(run.path, run.attempt + 1))
    assert json.loads((run.configs / "stopped_at.json").read_text()) == {"step": 3}
