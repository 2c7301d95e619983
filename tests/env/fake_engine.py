"""A token-in, token-out engine without a model: what it answers is scripted by a function of the prompt."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from prl.assets import bundled_model
from prl.env.renderers import policy_tokenizer

END = 7


@dataclass
class FakeEngine:
    """Serves the bundled tiny tokenizer on a thread of its own; every attribute may be changed in flight.

    `answer(prompt)` gives text, token ids, or an int: the HTTP status to fail with.
    """

    answer: Callable[[str], str | list[int] | int]
    latency: float = 0.0
    max_model_len: int = 512
    finish: str | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    inflight: int = 0

    def __post_init__(self) -> None:
        self.tokenizer = policy_tokenizer(bundled_model("tiny"))
        self.rng = random.Random(0)
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
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": self.max_model_len}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read())
        self.requests.append({**body, "headers": dict(request.headers)})
        self.inflight += 1
        try:
            await asyncio.sleep(self.latency)
            return self._reply(body)
        finally:
            self.inflight -= 1

    def _reply(self, body: dict[str, Any]) -> web.Response:
        answer = self.answer(self.tokenizer.decode(body["token_ids"]))
        if isinstance(answer, int):
            return web.json_response({"error": {"message": "scripted failure"}}, status=answer)
        ids = [*self.tokenizer.encode(answer), END] if isinstance(answer, str) else answer
        limit = body["sampling_params"].get("max_tokens") or len(ids)
        finish = "length" if len(ids) > limit else "stop"
        logprobs = [{"token": f"token_id:{i}", "logprob": -self.rng.random()} for i in ids[:limit]]
        choice = {"index": 0, "token_ids": ids[:limit], "finish_reason": self.finish or finish}
        return web.json_response(
            {"request_id": "fake", "choices": [{**choice, "logprobs": {"content": logprobs}}]}
        )


def last_user(prompt: str) -> str:
    """Text of the last user message in a decoded prompt."""
    return prompt.rsplit("<|user|>", 1)[1].split("<|end|>")[0]


def oracle(prompt: str) -> str:
    """The right answer to a task of reverse_text or arithmetic."""
    verb, _, rest = last_user(prompt).partition(" ")
    return f"[{rest[::-1]}]" if verb == "reverse" else f"[{sum(map(int, rest.split('+')))}]"
