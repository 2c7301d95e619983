"""One measurement of `prl bench orchestrator`, as a process: `bare` or `prl` on an environment server.

Prints `START` and `STOP` when the measured part begins and ends (both in the steady state, with all rollouts
in flight), and at the end one JSON line with what this process used between them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from launchers.role import prepare_process
from prl.algo import build_algorithm
from prl.config.load import load_resolved
from prl.config.schema import RlConfig
from prl.curriculum import build_curriculum
from prl.env.bare import BareClient
from prl.env.source import EnvSource
from prl.orchestrator.assemble import assemble
from prl.orchestrator.connect import Connected
from prl.orchestrator.episodes import RolloutSource
from prl.orchestrator.lag import LagProbe
from prl.orchestrator.loop import MainLoop
from prl.orchestrator.main import favour_the_loop, forget_the_imports
from prl.records import WeightVersion
from prl.run_dir import RunDir
from prl.sync.versions import mark_complete

BARE_TASKS = 64
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
PATIENCE = 3600.0


@dataclass
class Usage:
    """What the process used in the measured part, seconds and bytes."""

    rollouts: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    lag_median: float = 0.0
    lag_p99: float = 0.0
    bytes_before: int = 0
    bytes_at_end: int = 0


class Meter:
    """Counts rollouts; measures from the `warm`-th to the `total`-th."""

    def __init__(self, warm: int, total: int) -> None:
        self._warm, self._total = warm, total
        self._count = 0
        self._started: tuple[int, float, float] | None = None
        self.probe = LagProbe()
        self.usage = Usage(bytes_before=_memory())
        self.over = asyncio.Event()

    def add(self, count: int = 1) -> bool:
        """Count rollouts that ended; whether the measurement is over."""
        self._count += count
        if self._started is None and self._count >= self._warm:
            self._started = (self._count, time.perf_counter(), time.process_time())
            self.probe = LagProbe()
            print("START", flush=True)
        elif not self.over.is_set() and self._started is not None and self._count >= self._total:
            self.over.set()
            self._stop(*self._started)
        return self.over.is_set()

    def _stop(self, count: int, clock: float, cpu: float) -> None:
        print("STOP", flush=True)
        self.usage.seconds = time.perf_counter() - clock
        self.usage.cpu = time.process_time() - cpu
        self.usage.rollouts = self._count - count
        lag = self.probe.metrics()
        self.usage.lag_median = lag.get("event_loop_lag/median", 0.0)
        self.usage.lag_p99 = lag.get("event_loop_lag/p99", 0.0)
        self.usage.bytes_at_end = _memory()

    async def watch_lag(self) -> None:
        """Probe the loop; a new probe is taken when the measured part begins."""
        probe, running = self.probe, asyncio.create_task(self.probe.run())
        while True:
            await asyncio.sleep(0.05)
            if probe is not self.probe:
                running.cancel()
                probe, running = self.probe, asyncio.create_task(self.probe.run())


async def bare(config: RlConfig, address: str, engine: str, meter: Meter) -> None:
    """So many workers, each running one task after the other through verifiers' client."""
    (env,) = config.env
    source = EnvSource(env, config.env[env], config)
    tasks = [task.data for task in itertools.islice(source.tasks, BARE_TASKS)]
    client = BareClient(address, config, f"{engine}/v1", SAMPLING)
    forget_the_imports()
    lag = asyncio.create_task(meter.watch_lag())
    inflight = config.rollout.max_inflight
    assert inflight is not None
    workers = [asyncio.create_task(client.work(tasks, meter.add)) for _ in range(inflight)]
    await asyncio.wait(workers, return_when=asyncio.FIRST_COMPLETED)
    lag.cancel()
    for worker in workers:
        worker.cancel()
    await asyncio.wait(workers)
    await client.close()


class NoEngine:
    """Admin routes of an engine whose weights are always those just published."""

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weight_dir: str, version: int) -> Mapping[str, Any]:
        return {"version": version, "fingerprint": f"v{version}", "seconds": 0.0}


class NoTrainer:
    """Takes each batch and publishes the next version at once."""

    def __init__(self, broadcasts: Path) -> None:
        self._broadcasts = broadcasts

    async def serve(self) -> None:
        await asyncio.Event().wait()

    async def put(self, step: int, messages: Sequence[bytes]) -> None:
        self.publish(step)

    def publish(self, version: int) -> None:
        path = self._broadcasts / f"step_{version}"
        path.mkdir(parents=True)
        record = WeightVersion(version, str(path), f"v{version}", 0)
        mark_complete(record)


async def orchestrated(config: RlConfig, run: RunDir, address: str, engine: str, meter: Meter) -> None:
    """The whole orchestrator, with an engine and a trainer that take no time."""
    favour_the_loop()
    (env,) = config.env
    source = EnvSource(env, config.env[env], config)
    await source.start(address)
    counted = _counted(source.run, meter.add)
    rollouts = RolloutSource(
        env=env, run=counted, group_size=config.rollout.group_size, sampling=SAMPLING, timeout=PATIENCE,
        base_url=f"{engine}/v1", model=config.model.name,
    )  # fmt: skip
    curriculum = build_curriculum(config.curriculum, env=env, tasks=source.tasks, endless=source.endless)
    algorithm = build_algorithm(config.algo, env=env)
    connected = Connected(NoEngine(), {env: rollouts}, {env: algorithm}, {env: curriculum})  # type: ignore[arg-type]
    trainer = NoTrainer(run.broadcasts)
    trainer.publish(0)
    parts = assemble(config, run, connected, trainer, None)
    await parts.watcher.apply_first(0, PATIENCE)
    forget_the_imports()
    lag = asyncio.create_task(meter.watch_lag())
    loop = asyncio.create_task(MainLoop(parts, max_steps=None, patience=PATIENCE).run())
    over = asyncio.create_task(meter.over.wait())
    await asyncio.wait({loop, over}, return_when=asyncio.FIRST_COMPLETED)
    lag.cancel()
    if loop.done():
        loop.result()
    loop.cancel()
    await asyncio.wait({loop})
    await source.close()


def _counted(run: Callable[..., Any], add: Callable[[], object]) -> Callable[..., Any]:
    async def counted(*args: Any, **kwargs: Any) -> Any:
        episode = await run(*args, **kwargs)
        add()
        return episode

    return counted


def _memory() -> int:
    return psutil.Process(os.getpid()).memory_info().rss


def main(mode: str, resolved: Path, address: str, engine: str, warm: int, total: int) -> None:
    _, config = load_resolved(resolved)
    meter = Meter(warm, total)
    run = RunDir.from_resolved(resolved)
    work = (
        bare(config, address, engine, meter)
        if mode == "bare"
        else orchestrated(config, run, address, engine, meter)
    )
    asyncio.run(work)
    print(json.dumps(asdict(meter.usage)), flush=True)


if __name__ == "__main__":
    prepare_process()
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
