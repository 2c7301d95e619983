from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launchers.processes import FAMILY_VAR, descendants, family, is_alive, kill, kill_family

DUMMY = Path(__file__).with_name("dummy_role.py")


@pytest.fixture
def tree(tmp_path: Path, wait_until: Callable) -> Iterator[subprocess.Popen]:
    """A process with a child and a grandchild, marked as the family "k"."""
    pids = tmp_path / "pids"
    environ = {**os.environ, FAMILY_VAR: "k"}
    root = subprocess.Popen([sys.executable, "-S", str(DUMMY), "family", str(pids)], env=environ)
    wait_until(pids.exists)
    yield root
    kill(family("k"))
    root.wait()


def test_a_family_is_found_also_after_its_head_died(tree: subprocess.Popen) -> None:
    assert len(family("k")) == 3 and len(descendants(tree.pid)) == 2
    tree.send_signal(signal.SIGKILL)
    tree.wait()
    assert descendants(tree.pid) == set()
    assert len(family("k")) == 2
    assert family("another") == set()


def test_kill_family_leaves_nobody_and_says_so(tree: subprocess.Popen) -> None:
    members = family("k")
    assert kill_family("k") == set()
    assert not any(map(is_alive, members)) and family("k") == set()


def test_kill_family_also_ends_known_processes_that_lost_the_mark() -> None:
    stranger = subprocess.Popen([sys.executable, "-S", str(DUMMY), "serve_forever"])
    process = psutil.Process(stranger.pid)
    assert is_alive(process)
    assert kill_family("nobody", [process]) == set()
    assert stranger.wait(timeout=5) == -signal.SIGKILL
    assert not is_alive(process)


def test_the_caller_is_never_part_of_the_family(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "import os; from launchers.processes import family; print(len(family('me')))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, FAMILY_VAR: "me"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "0\n"


def test_killing_a_process_that_is_gone_is_no_error() -> None:
    done = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process = psutil.Process(done.pid)
    done.wait()
    kill([process])
    assert not is_alive(process)


def test_the_guard_ends_the_family_when_its_pipe_closes_and_ignores_other_signals(
    tree: subprocess.Popen,
) -> None:
    guard = subprocess.Popen(
        [sys.executable, "-m", "launchers.guard"], stdin=subprocess.PIPE, env={**os.environ, FAMILY_VAR: "k"}
    )
    assert guard.stdin is not None
    guard.stdin.write(b"x")
    guard.stdin.flush()
    for process in descendants(tree.pid):
        assert is_alive(process)
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(timeout=0.5)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2):
        guard.send_signal(signum)
    with pytest.raises(subprocess.TimeoutExpired):
        guard.wait(timeout=0.3)
    guard.stdin.close()
    assert guard.wait(timeout=10) == 0
    assert family("k") == set()
