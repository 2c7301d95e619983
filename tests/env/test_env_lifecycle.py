"""Environment servers as processes: start, stop, death; and what a client notices of it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from env_server_process import ServerProcess, make_config
from fake_engine import FakeEngine

from prl.config import sources
from prl.env.source import EnvServerDied, EnvSource
from prl.records import Episode

SECONDS_TO_NOTICE = 15.0
"""Far above what it takes on a free machine (3 s), far below for ever."""


async def run_some(source: EnvSource, engine: FakeEngine, n: int, max_tokens: int = 16) -> list[Episode]:
    tasks = itertools.islice(source.tasks, n)
    sampling = {"temperature": 1.0, "max_tokens": max_tokens}
    call = {"group_id": "g", "base_url": engine.base_url, "model": "tiny", "train": True, "cache_salt": "0"}
    return await asyncio.gather(*(source.run(task, sampling=sampling, **call) for task in tasks))


async def survive(source: EnvSource, engine: FakeEngine, harm: Callable[[], None]) -> float:
    """Seconds from `harm` until rollouts in flight end with EnvServerDied."""
    engine.latency = 600.0
    running = asyncio.create_task(run_some(source, engine, 4))
    while engine.inflight < 4:  # noqa: ASYNC110 - counted on the engine's thread
        await asyncio.sleep(0.01)
    harmed = time.monotonic()
    await asyncio.to_thread(harm)
    with pytest.raises(EnvServerDied):
        await running
    with pytest.raises(EnvServerDied):
        await run_some(source, engine, 1)
    return time.monotonic() - harmed


def connected(server: ServerProcess, source: EnvSource, work: Callable[[], object]) -> object:
    address = server.address()

    async def main() -> object:
        await source.start(address)
        try:
            return await work()  # type: ignore[misc]
        finally:
            await source.close()

    return asyncio.run(main())


def reverse_text() -> EnvSource:
    config = make_config(reverse_text=sources.EnvConfig())
    return EnvSource("reverse_text", config.env["reverse_text"], config)


def test_reverse_text_trains_from_start_to_sigterm(
    reverse_text_server: ServerProcess, engine: FakeEngine
) -> None:
    """The default environment: right answers earn 1; SIGTERM ends the server at once, rollouts or not."""
    server, source = reverse_text_server, reverse_text()
    stopped: list[tuple[int, float]] = []

    async def work() -> tuple[list[Episode], list[Episode], float]:
        right = await run_some(source, engine, 8)
        cut = await run_some(source, engine, 8, max_tokens=3)
        return right, cut, await survive(source, engine, lambda: stopped.append(server.terminate()))

    right, cut, noticed = connected(server, source, work)  # type: ignore[misc]
    assert [episode.traces[0].reward for episode in right] == [1.0] * 8
    assert all(episode.traces[0].metrics == {"exact": 1.0, "formatted": 1.0} for episode in right)
    assert all(episode.traces[0].is_truncated and episode.traces[0].trainable for episode in cut)
    assert [episode.traces[0].reward for episode in cut] == [0.0] * 8
    ((code, seconds),) = stopped
    assert code == 0
    assert seconds < 10.0
    assert noticed < SECONDS_TO_NOTICE


@pytest.mark.parametrize("reverse_text_server", [2], indirect=True)
def test_a_pool_dies_with_its_worker_and_leaves_no_orphan(
    reverse_text_server: ServerProcess, engine: FakeEngine
) -> None:
    server, source = reverse_text_server, reverse_text()
    family: list[psutil.Process] = []

    def kill_a_worker() -> None:
        family.extend(psutil.Process(server.process.pid).children(recursive=True))
        workers = [child for child in family if "spawn_main" in " ".join(child.cmdline())]
        assert len(workers) == 2
        workers[0].kill()
        assert server.process.wait(30) == 1

    async def work() -> tuple[list[Episode], float]:
        return await run_some(source, engine, 8), await survive(source, engine, kill_a_worker)

    episodes, noticed = connected(server, source, work)  # type: ignore[misc]
    assert [episode.traces[0].reward for episode in episodes] == [1.0] * 8
    assert noticed < SECONDS_TO_NOTICE
    assert psutil.wait_procs(family, timeout=10)[1] == []
    assert "a worker died" in Path(server.log.name).read_text()


def test_a_server_that_was_never_there_is_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl.env.client.READY_SECONDS", 1.0)
    source = reverse_text()

    async def main() -> None:
        with pytest.raises(EnvServerDied, match=r"env/reverse_text at tcp:.* does not answer"):
            await source.start("tcp://127.0.0.1:9")
        await source.close()

    asyncio.run(main())
