"""An embedded engine behind its real routes, on a loop of its own in a thread of the test process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import inference_models as lab
from aiohttp import web

from prl.inference.engine_thread import EngineThread
from prl.inference.http import Served
from prl.inference.sampler import Sampler
from prl.inference.server import make_app


@dataclass
class Engine:
    """A running engine: where it listens and what it serves. `sampler` is None for one out of reach."""

    base_url: str
    model: str
    vocab_size: int
    max_model_len: int
    stop_token: int
    sampler: Sampler | None = None


@contextmanager
def serving(
    directory: Path, *, slots: int = 8, max_length: int = 64, frozen: bool = False
) -> Iterator[Engine]:
    """Serve the model of `directory` as `tiny` until the context is left."""
    sampler = lab.sampler(directory, slots=slots, max_length=max_length)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    stop = asyncio.run_coroutine_threadsafe(_start(sampler, directory, frozen), loop).result(30)
    try:
        yield Engine(stop.url, "tiny", lab.VOCAB, max_length, lab.EOS, sampler)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)


class _Stop:
    def __init__(self, engine: EngineThread, runner: web.AppRunner, url: str) -> None:
        self.engine, self.runner, self.url = engine, runner, url

    async def __call__(self) -> None:
        assert await self.engine.stop()
        await self.runner.cleanup()
        if self.engine.failure.done():
            self.engine.failure.exception()


async def _start(sampler: Sampler, directory: Path, frozen: bool) -> _Stop:
    engine = EngineThread(sampler, threads=1)
    served = Served(engine, "tiny", directory, fingerprint_mode="full", frozen=frozen)
    engine.start()
    runner = web.AppRunner(make_app(served), access_log=None, handler_cancellation=True, shutdown_timeout=0.3)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return _Stop(engine, runner, f"http://127.0.0.1:{runner.addresses[0][1]}")
