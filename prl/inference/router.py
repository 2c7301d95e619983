"""The router before several engines: one address that behaves like one engine.

Requests that sample go to one engine: a session (`X-Session-ID`) stays where its first request went, which is
the least loaded healthy engine then; answers are streamed through. Admin calls go to all engines at once, and
the answer is one: the engines must agree on what they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
from aiohttp import web

from prl.inference.http import error_response, read_json

SESSION_HEADER = "X-Session-ID"
SESSIONS = 65_536
"""Sessions remembered; the ones unused for longest are forgotten first."""
HEALTH_SECONDS, HEALTH_TIMEOUT = 2.0, 10.0
ADMIN_SECONDS = 1800.0
MAX_BODY_BYTES = 256 << 20
CHUNK_BYTES = 1 << 16
HOP_HEADERS = {"host", "connection", "keep-alive", "transfer-encoding", "content-length", "upgrade", "te"}
FANNED_OUT = ("/pause", "/resume", "/update_weights", "/load_lora_adapter")

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Backend:
    """One engine. `load` counts the requests on their way through it, `given` all that it was chosen for."""

    url: str
    load: int = 0
    given: int = 0
    healthy: bool = True


class Router:
    """Spreads requests over `urls` (without /v1)."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.backends = [Backend(url.rstrip("/")) for url in urls]
        self._sessions: OrderedDict[str, Backend] = OrderedDict()
        self._http: aiohttp.ClientSession | None = None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self.health)
        app.router.add_get("/liveness", self.liveness)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/world_size", self.world_size)
        app.router.add_post("/init_broadcaster", self.init_broadcaster)
        app.router.add_post("/finish_session", self.finish_session)
        for path in FANNED_OUT:
            app.router.add_post(path, self.fan_out)
        app.router.add_route("*", "/{path:.*}", self.proxy)
        app.cleanup_ctx.append(self._background)
        return app

    def choose(self, session: str | None) -> Backend:
        """The session's engine while it is healthy, else the least loaded healthy one. Raises LookupError
        when none is healthy."""
        known = self._sessions.get(session) if session else None
        if known is None or not known.healthy:
            healthy = [backend for backend in self.backends if backend.healthy]
            if not healthy:
                raise LookupError("no engine is healthy")
            known = min(healthy, key=lambda backend: (backend.load, backend.given))
            known.given += 1
        if session:
            self._sessions[session] = known
            self._sessions.move_to_end(session)
            if len(self._sessions) > SESSIONS:
                self._sessions.popitem(last=False)
        return known

    async def proxy(self, request: web.Request) -> web.StreamResponse:
        """Pass a request to one engine and its answer back as it comes. 503 where none can take it."""
        try:
            backend = self.choose(request.headers.get(SESSION_HEADER))
        except LookupError as error:
            return error_response(503, "ServiceUnavailableError", str(error))
        body = await request.read()
        backend.load += 1
        try:
            return await self._forward(request, body, backend)
        except aiohttp.ClientConnectionError as error:
            backend.healthy = False
            logger.warning("%s is out of reach: %s", backend.url, error)
            return error_response(503, "ServiceUnavailableError", f"{backend.url} is out of reach: {error}")
        finally:
            backend.load -= 1

    async def _forward(self, request: web.Request, body: bytes, backend: Backend) -> web.StreamResponse:
        headers = {key: value for key, value in request.headers.items() if key.lower() not in HOP_HEADERS}
        url = f"{backend.url}{request.raw_path}"
        async with self._client().request(request.method, url, data=body, headers=headers) as answer:
            streams = answer.headers.get("Content-Type", "").startswith("text/event-stream")
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in HOP_HEADERS}
            if not streams:
                return web.Response(status=answer.status, body=await answer.read(), headers=kept)
            response = web.StreamResponse(status=answer.status, headers=kept)
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            return response

    async def fan_out(self, request: web.Request) -> web.Response:
        """The same call to every engine; any failure, or answers that disagree, is told."""
        body = await request.read()
        path = request.raw_path
        answers = await asyncio.gather(
            *(self._call("POST", backend, path, body) for backend in self.backends)
        )
        return _agreed(answers)

    async def init_broadcaster(self, request: web.Request) -> web.Response:
        """Every engine joins with its own ranks: after the workers of the engines before it."""
        body = await read_json(request)
        sizes = [json.loads(text)["world_size"] for _, text in await self._all("GET", "/world_size")]
        first, calls = int(body.get("rank_offset", 1)), []
        for backend, size in zip(self.backends, sizes, strict=True):
            own = json.dumps({**body, "rank_offset": first}).encode()
            calls.append(self._call("POST", backend, "/init_broadcaster", own))
            first += size
        answers = await asyncio.gather(*calls)
        failed = next((answer for answer in answers if answer[0] != 200), None)
        return _plain(failed) if failed else web.json_response({"status": "joined", "workers": sum(sizes)})

    async def world_size(self, request: web.Request) -> web.Response:
        sizes = [json.loads(text)["world_size"] for _, text in await self._all("GET", "/world_size")]
        return web.json_response({"world_size": sum(sizes)})

    async def health(self, request: web.Request) -> web.Response:
        """200 while every engine is healthy: an engine that is gone cannot take the next weights."""
        sick = [backend.url for backend in self.backends if not backend.healthy]
        if sick:
            return error_response(503, "ServiceUnavailableError", f"not healthy: {', '.join(sick)}")
        return web.json_response({"status": "ok", "engines": len(self.backends)})

    async def liveness(self, request: web.Request) -> web.Response:
        return _agreed(
            [
                (status, b"{}" if status == 200 else text)
                for status, text in await self._all("GET", "/liveness")
            ]
        )

    async def metrics(self, request: web.Request) -> web.Response:
        """The engines' metrics one after the other, each line labelled with its engine."""
        texts = [text.decode() for _, text in await self._all("GET", "/metrics")]
        lines = [_labelled(line, number) for number, text in enumerate(texts) for line in text.splitlines()]
        comments = dict.fromkeys(line for line in lines if line.startswith("#"))
        samples = [line for line in lines if not line.startswith("#")]
        text = "\n".join([*comments, *samples]) + "\n"
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def finish_session(self, request: web.Request) -> web.Response:
        """Forget the session `session_id`, so that its engine counts as free of it."""
        known = self._sessions.pop(request.query.get("session_id", ""), None)
        return web.json_response({"status": "finished" if known else "unknown"})

    async def _all(self, method: str, path: str) -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(self._call(method, backend, path) for backend in self.backends))

    async def _call(
        self, method: str, backend: Backend, path: str, body: bytes | None = None
    ) -> tuple[int, bytes]:
        """(status, body) of an admin call; 503 when the engine cannot be reached."""
        timeout = aiohttp.ClientTimeout(total=ADMIN_SECONDS)
        try:
            async with self._client().request(
                method, f"{backend.url}{path}", data=body, timeout=timeout
            ) as answer:
                return answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = f"{backend.url}{path}: {type(error).__name__}: {error}"
            return 503, json.dumps({"error": {"message": reason, "code": 503}}).encode()

    async def _watch_health(self) -> None:
        while True:
            await asyncio.gather(*(self._look(backend) for backend in self.backends))
            await asyncio.sleep(HEALTH_SECONDS)

    async def _look(self, backend: Backend) -> None:
        timeout = aiohttp.ClientTimeout(total=HEALTH_TIMEOUT)
        try:
            async with self._client().get(f"{backend.url}/health", timeout=timeout) as answer:
                healthy = answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            healthy = False
        if healthy != backend.healthy:
            logger.warning("%s is %s", backend.url, "healthy again" if healthy else "not healthy")
        backend.healthy = healthy

    async def _background(self, app: web.Application) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._watch_health())
        yield
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await self._client().close()

    def _client(self) -> aiohttp.ClientSession:
        """Opened on first use, because it belongs to the running loop."""
        if self._http is None:
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0),
                auto_decompress=False,
            )
        return self._http


def _agreed(answers: Sequence[tuple[int, bytes]]) -> web.Response:
    """One answer for all engines: the first failure, 409 if they serve different weights, else the first."""
    for answer in answers:
        if answer[0] != 200:
            return _plain(answer)
    prints = {str(json.loads(text).get("fingerprint")) for _, text in answers}
    if len(prints) > 1:
        return error_response(409, "Conflict", f"the engines serve different weights: {sorted(prints)}")
    return _plain(answers[0])


def _plain(answer: tuple[int, bytes]) -> web.Response:
    return web.Response(status=answer[0], body=answer[1], content_type="application/json")


def _labelled(line: str, engine: int) -> str:
    """A line of Prometheus text with one label more."""
    match = re.match(r"([A-Za-z_:][\w:]*)(\{(.*)\})? (.*)$", line)
    if line.startswith("#") or match is None:
        return line
    name, _, labels, value = match.groups()
    engines = f'engine="{engine}"'
    if labels and 'engine="' in labels:
        engines = f'replica="{engine}"'
    return f"{name}{{{', '.join(filter(None, [labels, engines]))}}} {value}".replace(", ", ",")
