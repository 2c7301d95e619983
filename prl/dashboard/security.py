"""What every answer and every request must satisfy, before any route sees it."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[
    [Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]

LOCAL_HOSTS = frozenset({b"127.0.0.1", b"localhost", b"[::1]"})
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
    "cache-control": "no-store",
}


class Gate:
    """ASGI middleware: reading methods only, local host names only, the security headers on every answer.

    A page of another site that makes the browser resolve its own name to 127.0.0.1 sends that name as Host:
    it is refused. `last_request` is when somebody last asked (seconds, monotonic).
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self.last_request = time.monotonic()

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        self.last_request = time.monotonic()
        if scope["method"] not in ("GET", "HEAD"):
            await _refuse(send, 405, b"this page only reads")
        elif _host(scope) not in LOCAL_HOSTS:
            await _refuse(send, 421, b"ask for 127.0.0.1 or localhost")
        else:
            await self._app(scope, receive, lambda message: send(_with_headers(message)))


def _host(scope: Message) -> bytes:
    host = next((bytes(value) for name, value in scope["headers"] if name == b"host"), b"")
    name, _, port = host.rpartition(b":")
    return name if name and port.isdigit() else host


def _with_headers(message: Message) -> Message:
    if message["type"] == "http.response.start":
        own = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
        kept = [pair for pair in message["headers"] if bytes(pair[0]).decode().lower() not in HEADERS]
        message["headers"] = kept + own
    return message


async def _refuse(send: Any, status: int, text: bytes) -> None:
    head = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
    if status == 405:
        head.append((b"allow", b"GET, HEAD"))
    await send(_with_headers({"type": "http.response.start", "status": status, "headers": head}))
    await send({"type": "http.response.body", "body": text})
