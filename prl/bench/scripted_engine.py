"""An engine without a model, as a process: waits as long as asked, then returns as many tokens as asked.

`python -m prl.bench.scripted_engine LATENCY TOKENS` prints its URL. Half of the answers are letters in
brackets, some end in a right word, the rest earn nothing: so groups have rewards that differ.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys

from aiohttp import web

from launchers.role import prepare_process
from prl.assets import bundled_model
from prl.env.renderers import policy_tokenizer

END = 7
WORD = "about"


class ScriptedEngine:
    """Routes of `/inference/v1/generate` and `/v1/models`. `latency` in seconds; `tokens` of each answer."""

    def __init__(self, latency: float, tokens: int) -> None:
        self._latency = latency
        self._rng = random.Random(0)
        encode = policy_tokenizer(bundled_model("tiny")).encode
        room = tokens - 1
        texts = [f"[{'a' * (room - 2)}]", "a" * (room - len(WORD) - 2) + f"[{WORD}]", "a" * room]
        self._answers = [self._answer([*encode(text), END]) for text in texts]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/inference/v1/generate", self._generate)
        return app

    def _answer(self, ids: list[int]) -> bytes:
        """Encoded once: the engine's own CPU time must not be what limits the benchmark."""
        content = [{"token": f"token_id:{i}", "logprob": -self._rng.random()} for i in ids]
        choice = {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return json.dumps({"request_id": "scripted", "choices": [choice]}).encode()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 2048}]})

    async def _generate(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(self._latency)
        (body,) = self._rng.choices(self._answers, (0.5, 0.15, 0.35))
        return web.Response(body=body, content_type="application/json")


async def serve(latency: float, tokens: int) -> None:
    """Serve until killed."""
    runner = web.AppRunner(ScriptedEngine(latency, tokens).app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    prepare_process()
    asyncio.run(serve(float(sys.argv[1]), int(sys.argv[2])))
