"""`python -m prl dashboard [dirs]`: serve the page on 127.0.0.1 until it is stopped."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prl.dashboard.daemon import Daemon, state_directory

if TYPE_CHECKING:
    import uvicorn

    from prl.dashboard.security import Gate

HOST, PORT = "127.0.0.1", 7788
PORTS_TRIED = 100
IDLE_SECONDS = 24 * 3600.0
REFUSED = 2


def main(words: Sequence[str]) -> int:
    """Exit codes: 0 served until it was stopped, or one serves already; 2 refused."""
    asked = parse(words)
    directories = [Path(word).expanduser() for word in asked.dirs]
    if missing := [str(path) for path in directories if not path.is_dir()]:
        return _refuse(f"no such directory: {', '.join(missing)}")
    if not directories and not asked.detached:
        directories = [path for path in (Path("outputs"), Path("multirun")) if path.is_dir()]
    if asked.isolated:
        if not directories:
            return _refuse("--isolated serves the directories given, and there are none")
        served = [path.resolve() for path in directories]
        return serve(lambda: served, asked.port, lambda url: print(f"dashboard: {url}", flush=True))
    return _serve_for_user(directories, asked)


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="prl dashboard", description="A read-only web page over run directories, on this host only."
    )
    parser.add_argument("dirs", nargs="*", help="output directories or runs (default: outputs, multirun)")
    parser.add_argument("--port", type=int, default=PORT, help="the first port to try (default %(default)s)")
    parser.add_argument(
        "--isolated", action="store_true", help="serve only DIRS, beside any other dashboard of yours"
    )
    parser.add_argument("--detached", action="store_true", help="end when nobody looked at it for a day")
    return parser.parse_args(list(words))


def _serve_for_user(directories: Sequence[Path], asked: argparse.Namespace) -> int:
    """The one dashboard of this user on this host; if it lives already, it learns of the directories."""
    daemon = Daemon(state_directory())
    if directories:
        daemon.register(directories)
    with daemon.claimed() as mine:
        if not mine:
            print(f"dashboard: {_known_url(daemon)}", flush=True)
            return 0
        if not daemon.directories():
            return _refuse("there is no directory to serve: name one, or start a run first")

        def tell(url: str) -> None:
            daemon.publish(url)
            print(f"dashboard: {url}", flush=True)

        return serve(daemon.directories, asked.port, tell, IDLE_SECONDS if asked.detached else None)


def serve(
    roots: Callable[[], Sequence[Path]], port: int, tell: Callable[[str], None], idle: float | None = None
) -> int:
    """Serve until SIGINT or SIGTERM, or until nobody asked for `idle` seconds; `tell` gets the url."""
    import uvicorn

    from prl.dashboard.app import make_app

    try:
        listening = bind(port)
    except OSError as error:
        return _refuse(str(error))
    gate = make_app(roots)
    server = uvicorn.Server(uvicorn.Config(gate, log_level="warning", access_log=False, lifespan="off"))
    # uvicorn ends cleanly on a signal and then raises it again, to whatever handler was there before.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if idle is not None:
        threading.Thread(target=_end_when_idle, args=(gate, server, idle), name="idle", daemon=True).start()
    tell(f"http://{HOST}:{listening.getsockname()[1]}")
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:
        pass
    finally:
        listening.close()
    return 0


def bind(port: int) -> socket.socket:
    """A listening socket on the first free port from `port`. Raises OSError when a hundred are taken."""
    for candidate in range(port, min(port + PORTS_TRIED, 65536)):
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((HOST, candidate))
        except OSError:
            listening.close()
            continue
        listening.listen(128)
        return listening
    raise OSError(f"no free port from {port} to {port + PORTS_TRIED - 1}")


def _end_when_idle(gate: Gate, server: uvicorn.Server, idle: float) -> None:
    while time.monotonic() - gate.last_request < idle:
        time.sleep(min(60.0, idle))
    server.should_exit = True


def _known_url(daemon: Daemon, seconds: float = 10.0) -> str:
    """The url of the other dashboard, which may be starting just now."""
    deadline = time.monotonic() + seconds
    while (url := daemon.url()) is None and time.monotonic() < deadline:
        time.sleep(0.1)
    return url or "starting"


def _refuse(text: str) -> int:
    print(text, file=sys.stderr)
    return REFUSED
