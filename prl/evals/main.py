"""The role `eval`: connects engine and environments, then runs every rollout that is not in the ledger."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import Any

from prl.config.schema import EvalConfig
from prl.evals.checkpoints import exported
from prl.evals.endpoint import check_endpoint
from prl.evals.ledger import Ledger, read_rows
from prl.evals.plan import Plan
from prl.evals.progress import Count, Progress, progress_file
from prl.evals.runner import Runner, Source
from prl.evals.sources import sampling_values
from prl.run_dir import RunDir, write_atomic

log = logging.getLogger(__name__)


def main(config: EvalConfig, run: RunDir, role: str) -> None:
    """Entry point of role `eval`. What the user can mend ends it with one line, for the launcher to show."""
    from prl.env.source import EnvServerDied

    try:
        asyncio.run(evaluate(config, run))
    except (ValueError, ConnectionError, TimeoutError, EnvServerDied) as error:
        log.error("%s", error, exc_info=True)
        write_atomic(run.configs / "failure.txt", f"{error}\n")
        sys.exit(1)


async def evaluate(config: EvalConfig, run: RunDir) -> None:
    """All checkpoints, all environments. Raises ValueError, ConnectionError, TimeoutError, EnvServerDied."""
    progress = Progress(note="connecting")
    async with contextlib.AsyncExitStack() as stack:
        writing = asyncio.create_task(progress.keep_writing(progress_file(run)))
        stack.callback(writing.cancel)
        base_url = await _connect_engine(config, run)
        sources = await _connect_sources(config, run, stack)
        steps = config.steps or [0]
        plan = Plan(
            {env: source.group_size for env, source in sources.items()},
            {env: [task.key for task in source.tasks] for env, source in sources.items()},
            steps,
        )
        await asyncio.to_thread(plan.write, run)
        ledger = await asyncio.to_thread(Ledger, run)
        stack.callback(ledger.close)
        _count_finished(progress, plan, run, ledger)
        runner = Runner(config, sources, base_url, ledger, progress)
        for step in steps:
            if step and any(job.key not in ledger.settled for job in runner.jobs(step)):
                progress.note = f"loading step {step}"
                await _load_weights(config, run, base_url, step)
            progress.note = ""
            await runner.run(step)
        writing.cancel()
        await asyncio.to_thread(progress.write, progress_file(run))


async def _connect_engine(config: EvalConfig, run: RunDir) -> str:
    """Base URL, ending in /v1, of an engine that serves the model."""
    from prl.inference.client import EngineAdmin

    if config.inference.name == "external":
        await check_endpoint(config, config.inference.base_url)
        return config.inference.base_url.rstrip("/")
    address = await run.wait_for_address("inference", config.inference.ready_timeout)
    async with contextlib.aclosing(EngineAdmin(address, config.inference.admin_timeout)) as engine:
        await engine.wait_ready(config.model.name, config.inference.ready_timeout)
    return f"{address}/v1"


async def _connect_sources(
    config: EvalConfig, run: RunDir, stack: contextlib.AsyncExitStack
) -> dict[str, Source]:
    from prl.env.source import EnvSource

    sources = {}
    for name, env_config in config.env.items():
        env: Any = await asyncio.to_thread(EnvSource, name, env_config, config, evaluation=True)
        if env.endless:
            raise ValueError(
                f"env.{name}: its taskset is endless; say how many of its tasks: -n 32 or select.limit=32"
            )
        stack.push_async_callback(env.close)
        await env.start(await run.wait_for_address(f"env/{name}", config.cluster.start_timeout))
        assert env_config.group_size is not None
        sources[name] = Source(
            env, list(env.tasks), env_config.group_size, sampling_values(env_config.sampling)
        )
    return sources


def _count_finished(progress: Progress, plan: Plan, run: RunDir, ledger: Ledger) -> None:
    """What earlier attempts did counts as done; what failed there is to be done again."""
    expected = plan.keys()
    for step, env in plan.parts():
        total = len(plan.tasks[env]) * plan.group_sizes[env]
        progress.counts[step, env] = Count(total)
    for key, row in read_rows(run).items():
        if key in expected and key in ledger.settled:
            progress.counts[key.step, key.env].add([agent.reward for agent in row.agents], failed=False)


async def _load_weights(config: EvalConfig, run: RunDir, base_url: str, step: int) -> None:
    """Give the engine the weights of a checkpoint, in place of what it serves."""
    from prl.inference.client import EngineAdmin

    with contextlib.ExitStack() as stack:
        directory = await asyncio.to_thread(
            stack.enter_context, exported(config, step, run.path / "weights_in_flight")
        )
        async with contextlib.aclosing(EngineAdmin(base_url, config.inference.admin_timeout)) as engine:
            answer = await engine.update_weights(str(directory), step)
    log.info("engine serves step %d: fingerprint %s", step, answer["fingerprint"])
    await asyncio.to_thread(
        write_atomic, run.configs / f"weights_step_{step}.txt", f"{answer['fingerprint']}\n"
    )
