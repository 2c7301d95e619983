"""The dashboard's real server in a thread, and a client that sends exactly the path it is told."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from prl.dashboard.app import make_app
from prl.dashboard.main import bind

WAIT_SECONDS = 60.0


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """Asks the server on 127.0.0.1:`port`."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> Answer:
        """The path goes out as it is: nothing normalises `..` or `%2e`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_SECONDS)
        try:
            connection.request(method, path, headers=headers or {})
            told = connection.getresponse()
            return Answer(told.status, {k.lower(): v for k, v in told.getheaders()}, told.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        answer = self.ask(path)
        assert answer.status == 200, (path, answer.status, answer.body[:500])
        return answer.json

    def id_of(self, name: str) -> str:
        return next(run["id"] for run in self.get("/api/runs") if run["name"] == name)

    def run(self, name: str, rest: str = "") -> Any:
        """A route below the run of this name."""
        return self.get(f"/api/runs/{self.id_of(name)}{rest}")


@contextlib.contextmanager
def served(roots: Sequence[Path]) -> Iterator[Client]:
    listening = bind(20_000 + threading.get_native_id() % 20_000)
    server = uvicorn.Server(
        uvicorn.Config(make_app(lambda: roots), log_level="warning", access_log=False, lifespan="off")
    )
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + WAIT_SECONDS
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.02)
    try:
        yield Client(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listening.close()
