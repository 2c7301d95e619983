from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic_runs import Shape, write_run

from prl.dashboard import main as command
from prl.dashboard.daemon import Daemon, offer, state_directory, wanted

WAIT_SECONDS = 90.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def runs_of_two(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("a", "b"):
        write_run(tmp_path / name / f"run_{name}", Shape(episodes=32))
    return tmp_path / "a", tmp_path / "b"


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment with a state directory of its own; whoever registered there is ended."""
    clean = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_CURRENT_TEST")}
    state = tmp_path / "state"
    yield {**clean, "PRL_DASHBOARD_STATE": str(state), "PYTHONPATH": os.pathsep.join(sys.path)}
    if told := read(Daemon(state).url_file):
        os.kill(told["pid"], signal.SIGTERM)
        wait_until(lambda: not Daemon(state).alive())


def read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def wait_until(condition, seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def dashboard(environment: dict[str, str], *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "prl", "dashboard", *words],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def names(url: str) -> set[str]:
    with urllib.request.urlopen(f"{url}/api/runs", timeout=WAIT_SECONDS) as answer:
        return {run["name"] for run in json.load(answer)}


def test_one_dashboard_per_user_learns_of_further_directories(
    environment: dict[str, str], runs_of_two: tuple[Path, Path]
) -> None:
    first = dashboard(environment, str(runs_of_two[0]), "--port", "23788")
    assert first.stdout is not None
    url = first.stdout.readline().strip().removeprefix("dashboard: ")
    try:
        assert names(url) == {"run_a"}
        second = dashboard(environment, str(runs_of_two[1]))
        told, _ = second.communicate(timeout=WAIT_SECONDS)
        assert (second.returncode, told.strip()) == (0, f"dashboard: {url}")
        wait_until(lambda: names(url) == {"run_a", "run_b"})
    finally:
        first.send_signal(signal.SIGTERM)
        assert first.wait(WAIT_SECONDS) == 0
        first.communicate()
    assert not Daemon(Path(environment["PRL_DASHBOARD_STATE"])).url_file.exists()


def test_a_taken_port_moves_to_the_next_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with command.bind(port) as listening:
            address, found = listening.getsockname()
    assert address == "127.0.0.1" and port < found < port + command.PORTS_TRIED


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "PORTS_TRIED", 1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="no free port"):
            command.bind(taken.getsockname()[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/place"], "no such directory: /no/such/place"),
        (["--isolated"], "--isolated serves the directories given"),
        ([], "there is no directory to serve"),
    ],
)
def test_nothing_to_serve_is_refused(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("PRL_DASHBOARD_STATE", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == command.REFUSED
    assert message in capsys.readouterr().err


def test_registered_directories_are_kept_newest_first_and_once(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "state")
    for name in ("a", "b", "a/inner", "gone"):
        (tmp_path / name).mkdir()
        daemon.register([tmp_path / name])
    daemon.register([tmp_path / "a"])
    (tmp_path / "gone").rmdir()
    assert daemon.directories() == [tmp_path / "a", tmp_path / "b"]
    assert oct((tmp_path / "state").stat().st_mode)[-3:] == "700"


def test_a_dead_dashboard_has_no_url(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    assert daemon.url() is None
    with daemon.claimed() as mine:
        assert mine
        daemon.publish("http://127.0.0.1:1")
        assert daemon.url() == "http://127.0.0.1:1"
        with Daemon(tmp_path).claimed() as other:
            assert not other
    assert not daemon.alive() and daemon.url() is None
    daemon.publish("http://127.0.0.1:2")  # what a crash leaves
    assert daemon.url() is None


def test_the_state_directory_can_be_chosen() -> None:
    assert state_directory({"PRL_DASHBOARD_STATE": "/x"}) == Path("/x")
    assert state_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/prl/dashboard")
    assert state_directory({}) == Path.home() / ".local" / "state" / "prl" / "dashboard"


@pytest.mark.parametrize(
    ("mode", "out", "environ", "expected"),
    [
        ("auto", Terminal(), {}, True),
        ("auto", io.StringIO(), {}, False),
        ("auto", Terminal(), {"CI": "true"}, False),
        ("auto", Terminal(), {"SLURM_JOB_ID": "7"}, False),
        ("never", Terminal(), {}, False),
        ("always", io.StringIO(), {"CI": "true"}, True),
    ],
)
def test_a_run_starts_it_for_a_person_only(
    mode: str, out: io.StringIO, environ: dict[str, str], expected: bool
) -> None:
    assert wanted(mode, out, environ) is expected


def test_a_run_that_is_not_on_a_terminal_leaves_no_trace(tmp_path: Path) -> None:
    environ = {"PRL_DASHBOARD_STATE": str(tmp_path / "state")}
    assert offer("auto", tmp_path, print, out=io.StringIO(), environ=environ) is None
    assert not (tmp_path / "state").exists()


def test_a_run_starts_the_dashboard_and_says_where_it_is(
    environment: dict[str, str], runs_of_two: tuple[Path, Path]
) -> None:
    said: list[str] = []
    environment["PRL_FAMILY"] = "of-the-run"
    for directory in runs_of_two:
        thread = offer("auto", directory, said.append, out=Terminal(), environ=environment)
        assert thread is not None
        thread.join(WAIT_SECONDS)
    assert len(said) == 2 and said[0] == said[1] and said[0].startswith("dashboard: http://127.0.0.1:")
    url = said[0].removeprefix("dashboard: ")
    wait_until(lambda: names(url) == {"run_a", "run_b"})
    told = read(Daemon(Path(environment["PRL_DASHBOARD_STATE"])).url_file)
    assert told is not None and told["url"] == url
    family = Path(f"/proc/{told['pid']}/environ").read_bytes()
    assert b"PRL_FAMILY" not in family, "the guard of the run would kill it"
    assert os.getsid(told["pid"]) != os.getsid(0)


def test_a_state_directory_that_cannot_be_made_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said: list[str] = []
    thread = offer(
        "always", tmp_path, said.append, environ={"PRL_DASHBOARD_STATE": str(tmp_path / "file" / "x")}
    )
    assert thread is not None
    thread.join(WAIT_SECONDS)
    assert len(said) == 1 and said[0].startswith("no dashboard: ")


def test_a_detached_dashboard_that_nobody_looks_at_ends(
    tmp_path: Path, runs_of_two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    urls: list[str] = []
    handler = signal.getsignal(signal.SIGTERM)
    try:
        assert command.serve(lambda: [runs_of_two[0]], 24788, urls.append, idle=0.2) == 0
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert urls[0].startswith("http://127.0.0.1:24")
