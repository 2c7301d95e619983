"""One dashboard per user and host: where it listens, which directories it serves, and how a run starts it.

`<state>/<host>.json` has the url and pid of the one that lives, `<host>.dirs.json` the directories, and the
lock on `<host>.lock` says whether it lives: the system releases it however the process ends.
Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from prl.run_dir import write_atomic

START_SECONDS = 30.0
MOST_DIRECTORIES = 50


class Daemon:
    """The files of this user's dashboard on this host."""

    def __init__(self, state: Path, host: str | None = None) -> None:
        self.state = state
        self._host = host or socket.gethostname()

    @property
    def url_file(self) -> Path:
        return self.state / f"{self._host}.json"

    @property
    def directories_file(self) -> Path:
        return self.state / f"{self._host}.dirs.json"

    def url(self) -> str | None:
        """Where the living dashboard listens; None if none lives."""
        if not self.alive():
            return None
        return str(told["url"]) if (told := _read(self.url_file)) else None

    def alive(self) -> bool:
        try:
            with (self.state / f"{self._host}.lock").open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    @contextlib.contextmanager
    def claimed(self) -> Iterator[bool]:
        """Hold the lock while the block runs; False if another dashboard has it."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.state / f"{self._host}.lock").open("ab") as lock:
            if not _locked(lock):
                yield False
                return
            try:
                yield True
            finally:
                self.url_file.unlink(missing_ok=True)

    def publish(self, url: str) -> None:
        write_atomic(self.url_file, json.dumps({"url": url, "pid": os.getpid()}))

    def register(self, directories: Sequence[Path]) -> None:
        """Serve these too, the newest first; the oldest of many are forgotten."""
        self.state.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.state / f"{self._host}.dirs.lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = [str(path.resolve()) for path in directories]
            known += [path for path in self._listed() if path not in known]
            write_atomic(self.directories_file, json.dumps(known[:MOST_DIRECTORIES]))

    def directories(self) -> list[Path]:
        """Registered directories that exist; one inside another is served with it."""
        found = [path for text in self._listed() if (path := Path(text)).is_dir()]
        return [path for path in found if not any(other in path.parents for other in found)]

    def _listed(self) -> list[str]:
        return list(_read(self.directories_file) or [])


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """`PRL_DASHBOARD_STATE`, else `prl/dashboard` below `XDG_STATE_HOME` or `~/.local/state`."""
    if given := environ.get("PRL_DASHBOARD_STATE"):
        return Path(given)
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "prl" / "dashboard"


def wanted(mode: str, out: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a run starts the dashboard: `auto` only where a person sits at a terminal of this host."""
    if mode != "auto":
        return mode == "always"
    elsewhere = any(environ.get(name) for name in ("CI", "SLURM_JOB_ID", "PYTEST_CURRENT_TEST"))
    return out.isatty() and not elsewhere


def offer(
    mode: str,
    output_dir: Path,
    say: Callable[[str], None],
    *,
    out: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
) -> threading.Thread | None:
    """For a launcher: register its runs, start the dashboard if there is none, say the url once it is known.

    Never delays or fails a run. Returns the thread that waits, None if no dashboard is wanted.
    """
    if not wanted(mode, out or sys.stdout, environ):
        return None
    thread = threading.Thread(target=_offer, args=(output_dir, say, environ), name="dashboard", daemon=True)
    thread.start()
    return thread


def _offer(output_dir: Path, say: Callable[[str], None], environ: Mapping[str, str]) -> None:
    daemon = Daemon(state_directory(environ))
    try:
        daemon.register([output_dir])
        if not daemon.alive():
            _start(daemon, environ)
        if url := _wait_for_url(daemon):
            say(f"dashboard: {url}")
        else:
            say(f"the dashboard did not start; see {daemon.state / 'log.txt'}")
    except OSError as error:
        say(f"no dashboard: {error}")


def _start(daemon: Daemon, environ: Mapping[str, str]) -> None:
    """A process of its own, which outlives the run and belongs to none of its process families."""
    own = {name: value for name, value in environ.items() if name != "PRL_FAMILY"}
    with (daemon.state / "log.txt").open("wb") as log:
        subprocess.Popen(
            [sys.executable, "-m", "prl", "dashboard", "--detached"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=own, start_new_session=True,
        )  # fmt: skip


def _wait_for_url(daemon: Daemon) -> str | None:
    deadline = time.monotonic() + START_SECONDS
    while (url := daemon.url()) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return url


def _locked(lock: IO[bytes], seconds: float = 0.5) -> bool:
    """Take the lock; waits a moment, because who only asks whether somebody lives holds it for an instant."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return None
