"""`/metrics` and `/healthz` of a process, from a thread of its own on a port that the system picks.

The address is published as `configs/attempt_n/addresses/metrics/<role>.json` of the run.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prl.config.serving import MonitorConfig
from prl.monitor.exposition import GAUGES, exposition, newest
from prl.run_dir import RunDir

log = logging.getLogger(__name__)

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
EVERYWHERE = ("0.0.0.0", "::", "")


class Endpoint:
    """Serves until `close`; a process that ends takes it along."""

    def __init__(self, host: str, run: RunDir, role: str) -> None:
        """Bind. Raises OSError if `host` is no address of this machine."""
        self.run, self.role, self.started = run, role, time.time()
        self._server = ThreadingHTTPServer((host, 0), _handler(self))
        self._server.daemon_threads = True
        shown = socket.gethostname() if host in EVERYWHERE else host
        self.address = f"http://{shown}:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics-endpoint", daemon=True
        )

    def start(self) -> None:
        """Serve, then tell others where."""
        self._thread.start()
        self.run.publish_address(f"metrics/{self.role}", self.address)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def health(self) -> dict[str, object]:
        """That it answers at all is the health of a process; how long ago its stream told something, too."""
        found: dict[str, object] = {"status": "ok", "role": self.role, "pid": os.getpid()}
        found["uptime_seconds"] = round(time.time() - self.started, 1)
        if self.role in GAUGES:
            told = newest(self.run.metric_file(GAUGES[self.role][0]))
            found["step"] = told.step
            if told.heard is not None:
                found["heard_seconds_ago"] = round(max(0.0, time.time() - told.heard), 1)
        return found


def open_endpoint(monitor: MonitorConfig, run: RunDir, role: str) -> Endpoint | None:
    """Start the endpoint of this process; one that cannot start ends no run."""
    try:
        endpoint = Endpoint(monitor.host, run, role)
    except OSError as error:
        log.warning("no metrics endpoint: monitor.host = %s: %s", monitor.host, error)
        return None
    endpoint.start()
    log.info("metrics at %s/metrics", endpoint.address)
    return endpoint


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._answer(200, PROMETHEUS, exposition(endpoint.run, endpoint.role))
            elif path in ("/healthz", "/health"):
                self._answer(200, "application/json", json.dumps(endpoint.health()))
            else:
                self._answer(404, "text/plain", "there are /metrics and /healthz\n")

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
