"""The thread that owns the sampler, and the asyncio side of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any, TypeVar

import torch

from prl.inference.dense_weights import TornWeights
from prl.inference.request import Completion, Output, Request
from prl.inference.sampler import Sampler

T = TypeVar("T")

STOP_SECONDS = 1.0

logger = logging.getLogger(__name__)


class EngineStopped(RuntimeError):
    """The sampler's thread is gone; nothing will be sampled any more."""


class EngineThread:
    """Runs a sampler in its own thread; everything but `_run` and `_carry_out` belongs to the event loop.

    Commands are carried out between two steps, in order of arrival. `failure` is a future that gets the
    exception if the thread dies.
    """

    def __init__(self, sampler: Sampler, *, threads: int) -> None:
        self.sampler = sampler
        self.paused = False
        self._threads = threads
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._listeners: dict[Request, asyncio.Queue[Output | Exception]] = {}
        self._calls: set[asyncio.Future[Any]] = set()
        self.failure: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> bool:
        """End the thread after the step it is in; requests under way get EngineStopped. False if the step
        takes longer than a second."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._fail_all(EngineStopped("the engine is shutting down"))
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        return not self._thread.is_alive()

    async def call(self, function: Callable[[], T]) -> T:
        """Run `function` in the sampler's thread, between two steps."""
        result: asyncio.Future[T] = self._loop.create_future()

        def command() -> None:
            try:
                value = function()
            except Exception as error:
                self._loop.call_soon_threadsafe(_settle, result, None, error)
                if isinstance(error, TornWeights):
                    raise
            else:
                self._loop.call_soon_threadsafe(_settle, result, value, None)

        self.send(command)
        self._calls.add(result)
        try:
            return await result
        finally:
            self._calls.discard(result)

    async def pause(self) -> None:
        """Return when no step is running; none will until `resume`. Requests stay where they are."""
        await self.call(lambda: setattr(self, "paused", True))

    async def resume(self) -> None:
        await self.call(lambda: setattr(self, "paused", False))

    async def complete(self, requests: Sequence[Request]) -> list[Completion]:
        """The finished completions, in order. Cancelling the awaiting task frees the requests' slots."""
        found: dict[Request, Completion] = {}
        with self.listen(requests) as listener:
            while len(found) < len(requests):
                output = await listener.next()
                if output.completion is not None:
                    found[output.request] = output.completion
        return [found[request] for request in requests]

    def listen(self, requests: Sequence[Request]) -> Listener:
        """Submit requests and follow them; leaving the context cancels those that have not ended."""
        return Listener(self, requests)

    def send(self, command: Callable[[], None]) -> None:
        """Have the thread carry out `command`. Raises EngineStopped when it never will."""
        if self._stopping or self.failure.done():
            raise EngineStopped("the engine has stopped")
        self._inbox.put(command)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            if queue := self._listeners.get(output.request):
                queue.put_nowait(output)

    def _fail(self, error: BaseException) -> None:
        if not self.failure.done():
            self.failure.set_exception(error)
        self._fail_all(EngineStopped(f"the engine has stopped: {error}"))

    def _fail_all(self, error: Exception) -> None:
        for queue in self._listeners.values():
            queue.put_nowait(error)
        for call in list(self._calls):
            _settle(call, None, error)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while not self._stopping:
                self._carry_out()
                if self.sampler.busy and not self.paused and not self._stopping:
                    outputs = self.sampler.step()
                    if outputs and not self._stopping:
                        self._loop.call_soon_threadsafe(self._deliver, outputs)
        except BaseException as error:
            logger.exception("the sampler died")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _carry_out(self) -> None:
        """Every command that has arrived; waits for one while there is nothing to sample."""
        if self.paused or not self.sampler.busy:
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()


class Listener:
    """What the steps bring to some requests, as a context manager of the event loop."""

    def __init__(self, engine: EngineThread, requests: Sequence[Request]) -> None:
        self._engine = engine
        self._open = set(requests)
        self._requests = requests
        self._queue: asyncio.Queue[Output | Exception] = asyncio.Queue()

    def __enter__(self) -> Listener:
        self._engine.send(lambda: self._engine.sampler.submit(*self._requests))
        self._engine._listeners.update(dict.fromkeys(self._requests, self._queue))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for request in self._requests:
            del self._engine._listeners[request]
        if self._open:
            self._engine._inbox.put(lambda: self._engine.sampler.cancel(*self._open))

    def drop(self, request: Request) -> None:
        """Cancel one of the requests; an output of it may still arrive."""
        self._open.discard(request)
        self._engine._inbox.put(lambda: self._engine.sampler.cancel(request))

    async def next(self) -> Output:
        """The next output of any of the requests. Raises EngineStopped if there will be none."""
        output = await self._queue.get()
        if isinstance(output, Exception):
            raise output
        if output.completion is not None:
            self._open.discard(output.request)
        return output


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
