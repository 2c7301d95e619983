from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launchers.interrupts import Interrupts
from launchers.local import GUARD, Supervisor, signal_name, supervise, tail
from launchers.placement import Role
from launchers.processes import family
from prl.run_dir import RunDir

Make = Callable[..., Role]


def started(supervisor: Supervisor) -> dict[str, int]:
    return {child.role.name: child.process.pid for child in supervisor.children}


def test_a_run_ends_well_when_all_jobs_did_and_servers_are_ended_then(
    run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    roles = [
        role("inference", "server", "serve"),
        role("a", "job", "work", "0.2"),
        role("b", "job", "work", "0.3"),
    ]
    began = time.monotonic()
    outcome = supervise(roles, run, 5.0, interrupts)
    assert (outcome.code, outcome.status, outcome.culprits) == (0, "FINISHED", ())
    assert time.monotonic() - began < 3, "a server that obeys SIGTERM costs no grace"
    assert "serving" in run.log_file("inference").read_text()


@pytest.mark.parametrize("victim", ["inference", "env/x", "orchestrator", "trainer/0", GUARD])
def test_kill_9_of_any_child_ends_the_run_names_it_and_leaves_nobody(
    victim: str,
    run: RunDir,
    role: Make,
    interrupts: Interrupts,
    tmp_path: Path,
    gone: Callable[[int], bool],
    wait_until: Callable,
) -> None:
    pids = tmp_path / "pids"
    roles = [
        role("inference", "server", "serve"),
        role("env/x", "server", "family", str(pids)),
        role("orchestrator", "job", "work", "60"),
        role("trainer/0", "job", "work", "60"),
    ]
    supervisor = Supervisor(roles, run, 5.0, interrupts)
    supervisor.start()
    wait_until(pids.exists)
    os.kill(started(supervisor)[victim], signal.SIGKILL)
    killed_at = time.monotonic()
    outcome = supervisor.watch()
    supervisor.stop()
    assert time.monotonic() - killed_at < 5
    assert (outcome.code, outcome.status, outcome.culprits) == (1, "FAILED", (victim,))
    assert outcome.reason == f"{victim} was killed by SIGKILL"
    everyone = [*started(supervisor).values(), *json.loads(pids.read_text())]
    assert all(map(gone, everyone)) and family(supervisor.key) == set()


def test_a_job_that_fails_ends_the_run_and_its_log_can_be_shown(
    run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    roles = [role("inference", "server", "serve"), role("trainer/0", "job", "fail", "3")]
    outcome = supervise(roles, run, 5.0, interrupts)
    assert (outcome.code, outcome.reason) == (1, "trainer/0 exited with code 3")
    assert tail(run.log_file("trainer/0")).splitlines() == ["some output", "the reason is this"]


def test_a_server_that_leaves_early_is_a_failure_even_with_code_0(
    run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    roles = [role("env/x", "server", "work", "0.1"), role("trainer/0", "job", "work", "60")]
    outcome = supervise(roles, run, 5.0, interrupts)
    assert (outcome.code, outcome.culprits) == (1, ("env/x",))
    assert outcome.reason == "env/x exited with code 0 before the run was done"


def test_the_killed_process_comes_first_among_those_that_died_together(
    run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    roles = [role("a", "job", "fail", "1"), role("b", "job", "work", "60")]
    supervisor = Supervisor(roles, run, 1.0, interrupts)
    supervisor.start()
    os.kill(started(supervisor)["b"], signal.SIGKILL)
    for child in supervisor.children[1:]:
        child.process.wait()
    outcome = supervisor.watch()
    supervisor.stop()
    assert outcome.culprits == ("b", "a")


def test_roles_start_in_the_order_of_the_table(run: RunDir, role: Make, interrupts: Interrupts) -> None:
    names = ["inference", "teacher/shared", "env/x", "orchestrator", "trainer/0"]
    supervisor = Supervisor([role(name, "job", "work", "60") for name in names], run, 1.0, interrupts)
    supervisor.start()
    births = [psutil.Process(pid).create_time() for pid in started(supervisor).values()]
    supervisor.stop()
    assert list(started(supervisor)) == [GUARD, *names]
    assert births == sorted(births)


def test_each_role_leads_its_own_session_and_knows_its_devices(
    run: RunDir, role: Make, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_ID", "someone-else")
    roles = [role("a", "job", "work", "60", env={"CUDA_VISIBLE_DEVICES": "3"})]
    supervisor = Supervisor(roles, run, 1.0, interrupts)
    supervisor.start()
    child = psutil.Process(started(supervisor)["a"])
    environ, session = child.environ(), os.getsid(child.pid)
    supervisor.stop()
    assert session == child.pid != os.getsid(0)
    assert environ["CUDA_VISIBLE_DEVICES"] == "3" and "MLFLOW_RUN_ID" not in environ


def test_a_stubborn_tree_gets_the_grace_and_then_dies_with_all_its_children(
    run: RunDir, role: Make, interrupts: Interrupts, wait_until: Callable
) -> None:
    supervisor = Supervisor([role("inference", "server", "stubborn")], run, 0.5, interrupts)
    supervisor.start()
    wait_until(lambda: len(family(supervisor.key)) == 3)
    began = time.monotonic()
    supervisor.stop()
    assert 0.5 <= time.monotonic() - began < 3
    assert family(supervisor.key) == set()


def test_a_second_interrupt_waits_for_nobody(
    run: RunDir, role: Make, interrupts: Interrupts, wait_until: Callable
) -> None:
    supervisor = Supervisor([role("inference", "server", "stubborn")], run, 60.0, interrupts)
    supervisor.start()
    wait_until(lambda: len(family(supervisor.key)) == 3)
    interrupts.signum, interrupts.count = signal.SIGINT, 1
    threading.Timer(0.3, lambda: setattr(interrupts, "count", 2)).start()
    began = time.monotonic()
    assert supervisor.watch().code == 130
    supervisor.stop()
    assert time.monotonic() - began < 3 and family(supervisor.key) == set()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_an_interrupt_ends_the_run_as_killed(
    signum: int, code: int, run: RunDir, role: Make, interrupts: Interrupts
) -> None:
    interrupts.signum = signum
    outcome = supervise([role("a", "job", "work", "60")], run, 1.0, interrupts)
    assert (outcome.code, outcome.status, outcome.culprits) == (code, "KILLED", ())
    assert outcome.reason == f"received {signal_name(signum)}"


def test_a_server_that_never_comes_up_is_named(run: RunDir, role: Make, interrupts: Interrupts) -> None:
    roles = [
        role("inference", "server", "serve", ready_timeout=0.3),
        role("env/x", "server", "serve", ready_timeout=0.3),
    ]
    run.publish_address("inference", "http://127.0.0.1:1")
    outcome = supervise([*roles, role("a", "job", "work", "60")], run, 1.0, interrupts)
    assert (outcome.code, outcome.culprits) == (1, ("env/x",)) and "not ready" in outcome.reason


def test_a_role_that_cannot_be_started_leaves_nobody_behind(
    run: RunDir, role: Make, interrupts: Interrupts, gone: Callable[[int], bool]
) -> None:
    supervisor = Supervisor(
        [role("a", "job", "work", "60"), Role("b", "job", ("/no/such/program",))], run, 1.0, interrupts
    )
    with pytest.raises(FileNotFoundError):
        supervisor.start()
    supervisor.stop()
    assert len(supervisor.children) == 2 and all(map(gone, started(supervisor).values()))


def test_the_end_is_announced_before_the_clean_up(run: RunDir, role: Make, interrupts: Interrupts) -> None:
    alive: list[int] = []
    key: list[str] = []

    def at_the_end() -> None:
        children = psutil.Process().children()
        key.extend(child.environ()["PRL_FAMILY"] for child in children if "PRL_FAMILY" in child.environ())
        alive.append(len(key))

    supervise(
        [role("inference", "server", "serve"), role("a", "job", "work", "0.1")],
        run,
        1.0,
        interrupts,
        at_the_end,
    )
    assert alive == [2], "the server and the guard"
    assert family(key[0]) == set()


def test_two_runs_side_by_side_do_not_end_each_other(
    tmp_path: Path, role: Make, interrupts: Interrupts
) -> None:
    runs = [RunDir(tmp_path / name) for name in "ab"]
    first, second = (Supervisor([role("x", "job", "work", "60")], run, 1.0, interrupts) for run in runs)
    first.start()
    second.start()
    first.stop()
    assert len(family(second.key)) == 2
    second.stop()


def test_tail_reads_the_end_only_and_cuts_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    path.write_text("".join(f"line {n}\n" for n in range(5000)) + "y" * 1000 + "\n")
    shown = tail(path, lines=3, width=50).splitlines()
    assert shown[-1] == "y" * 50
    path.write_text("".join(f"line {n}\n" for n in range(5000)))
    assert tail(path, lines=3).splitlines() == ["line 4997", "line 4998", "line 4999"]
    path.write_bytes(b"\xff\xfe broken \x80\n")
    assert "broken" in tail(path)


def test_tail_shows_a_json_line_as_text_with_its_whole_traceback(tmp_path: Path) -> None:
    path, frames = tmp_path / "x.log", "\n".join(f"  File {n}" for n in range(20))
    told = {"time": "2026-11-30T10:00:00.000+00:00", "level": "ERROR", "logger": "prl.x", "message": "oh"}
    told["exception"] = f"Traceback:\n{'frame ' * 500}\n{frames}\nValueError: the reason"
    path.write_text(f"a print\n{json.dumps(told)}\n")
    shown = tail(path, lines=30, width=80).splitlines()
    assert shown[0] == "a print" and shown[1] == "10:00:00 ERROR prl.x oh"
    assert shown[-1] == "ValueError: the reason" and max(map(len, shown)) <= 80
    assert tail(path, lines=1) == "ValueError: the reason"


def test_signal_names() -> None:
    assert signal_name(9) == "SIGKILL" and signal_name(40) == "signal 40"
