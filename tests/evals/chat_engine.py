"""An OpenAI-compatible endpoint without a model: every request is answered, or failed, by a script."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = str | int | dict[str, Any]


@dataclass
class ChatEngine:
    """`answer(messages)` gives text, a whole assistant message, or the HTTP status to fail with.

    Runs on a thread of its own; every attribute may be changed in flight.
    """

    answer: Callable[[list[dict[str, Any]]], Reply]
    models: list[str] = field(default_factory=lambda: ["chat"])
    key: str | None = None
    latency: float = 0.0
    listing_status: int = 200
    requests: list[dict[str, Any]] = field(default_factory=list)
    inflight: int = 0
    most_inflight: int = 0

    def __post_init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()

    def _refused(self, request: web.Request) -> bool:
        return self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}"

    async def _models(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        body = {"data": [{"id": name} for name in self.models]}
        return web.json_response(body, status=self.listing_status)

    async def _chat(self, request: web.Request) -> web.Response:
        if self._refused(request):
            return web.json_response({"error": {"message": "bad key"}}, status=401)
        body = json.loads(await request.read())
        self.requests.append({**body, "headers": dict(request.headers)})
        self.inflight += 1
        self.most_inflight = max(self.most_inflight, self.inflight)
        try:
            await asyncio.sleep(self.latency)
            return self._reply(body)
        finally:
            self.inflight -= 1

    def _reply(self, body: dict[str, Any]) -> web.Response:
        reply = self.answer(body["messages"])
        if isinstance(reply, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=reply)
        message = {"role": "assistant", **(reply if isinstance(reply, dict) else {"content": reply})}
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        choice = {"index": 0, "message": message, "finish_reason": finish}
        head = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({**head, "choices": [choice], "usage": usage})


def reverse(messages: list[dict[str, Any]]) -> str:
    """The right answer to a task of reverse_text."""
    return f"[{messages[-1]['content'].split()[-1][::-1]}]"
