"""New weights into the engines: pause, update, prove, resume; only then does the version count.

The version is bumped after every engine answered with the fingerprint that the trainer published. An update
is sent once: one that failed half-way is not safe to repeat, so its failure ends the run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from prl.orchestrator.pipeline import Pipeline
from prl.records import WeightVersion

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1


class Engine(Protocol):
    """Admin routes of one engine; `prl.inference.client.EngineAdmin`."""

    async def pause(self) -> Any: ...

    async def resume(self) -> Any: ...

    async def update_weights(self, weight_dir: str, version: int) -> Mapping[str, Any]: ...


class Watcher:
    """Polls for published versions and applies each newest one.

    `newest()` gives the newest complete version, `proof(version)` the fingerprint that the trainer found
    (blocking; they run in a thread). `announce()` is called when a version is about to be applied, before any
    engine pauses; while `held()`, none is. `applied(version)` follows each. `report(values, version)` gets
    `sync/*`.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        pipeline: Pipeline,
        *,
        newest: Callable[[], WeightVersion | None],
        announce: Callable[[], object],
        report: Callable[[Mapping[str, float], int], object],
        proof: Callable[[WeightVersion], str] = lambda published: published.fingerprint,
        held: Callable[[], bool] = lambda: False,
        applied: Callable[[int], object] = lambda version: None,
        offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._engines = engines
        self._pipeline = pipeline
        self._newest = newest
        self._announce = announce
        self._report = report
        self._proof = proof
        self._held = held
        self._applied = applied
        self._offload = offload
        self.updates = 0
        self.last_seconds = 0.0
        self.last_wait = 0.0

    async def run(self) -> None:
        """Apply versions until cancelled. Raises when an engine fails or holds other weights."""
        clock = asyncio.get_running_loop().time
        since = clock()
        while True:
            found = await self._offload(self._newest)
            if found is not None and found.version > self._pipeline.version and not self._held():
                self.last_wait = clock() - since
                await self.apply(found)
                self._applied(found.version)
                since = clock()
            else:
                await asyncio.sleep(POLL_SECONDS)

    async def apply_first(self, version: int, patience: float) -> None:
        """Wait for v`version`, which starts the run, and apply it. Also proves the transport at once.

        Raises TimeoutError after `patience` seconds, ValueError when a newer version lies there already.
        """
        found: WeightVersion | None = None
        async with asyncio.timeout(patience):
            while found is None or found.version < version:
                await asyncio.sleep(POLL_SECONDS)
                found = await self._offload(self._newest)
        if found.version != version:
            raise ValueError(
                f"{Path(found.path).parent} holds v{found.version}, but this run starts at v{version}: "
                "weights of an abandoned attempt; remove them"
            )
        await self.apply(found)

    async def apply(self, published: WeightVersion) -> None:
        """Bring every engine to `published`; the pipeline's version moves when all have proven it."""
        self._pipeline.updating = True
        try:
            self._announce()
            seconds = await self._pause_and_update(published)
        finally:
            self._pipeline.updating = False
        self._pipeline.version = published.version
        self.updates += 1
        self.last_seconds = seconds
        self._pipeline.notify()
        rate = {"sync/bytes_per_second": published.num_bytes / seconds} if seconds > 0 else {}
        self._report({"sync/fingerprint_ok": 1.0, "sync/seconds": seconds, **rate}, published.version)
        log.info("engines serve v%d (%.2f s)", published.version, seconds)

    async def _pause_and_update(self, published: WeightVersion) -> float:
        """Seconds that the engines stood still. They are resumed whatever happens."""
        clock = asyncio.get_running_loop().time
        start = clock()
        try:
            await self._all(engine.pause() for engine in self._engines)
            answers = await self._all(
                engine.update_weights(published.path, published.version) for engine in self._engines
            )
            expected = await self._offload(self._proof, published)
            for engine, answer in zip(self._engines, answers, strict=True):
                self._prove(engine, answer, published.version, expected)
        finally:
            await self._all(engine.resume() for engine in self._engines)
        return clock() - start

    def _prove(self, engine: Engine, answer: Mapping[str, Any], version: int, expected: str) -> None:
        served = (answer.get("version"), answer.get("fingerprint"))
        if served != (version, expected):
            self._report({"sync/fingerprint_ok": 0.0}, version)
            raise RuntimeError(
                f"{engine} serves v{served[0]} with fingerprint {served[1]}, the trainer published "
                f"v{version} with fingerprint {expected}: not the same weights"
            )

    async def _all(self, calls: Any) -> list[Any]:
        """Every call to its end, also when one fails; then the first failure is raised."""
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results
