"""The environments to evaluate on while training, connected."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from typing import Any

from prl.config.evals import EvalEnvConfig, OnlineEvalConfig
from prl.env.server import eval_seed
from prl.env.source import EnvSource
from prl.evals.sources import merged_sampling, merged_select, sampling_values
from prl.orchestrator.eval_epoch import EvalSource
from prl.orchestrator.succession import Succession
from prl.run_dir import RunDir


async def connect_evals(
    config: Any, run: RunDir, *, base_url: str, model: str, stack: contextlib.AsyncExitStack
) -> list[EvalSource]:
    """A source for each of `eval.env`, its server connected; `stack` closes them.

    `config` is that of any command with `eval`; `base_url` ends in /v1 and serves `model`. Raises ValueError
    for an endless taskset without a limit, TimeoutError for a server that does not come up.
    """
    shared: OnlineEvalConfig = config.eval
    sources = []
    for name, own in shared.env.items():
        env = dataclasses.replace(own, select=merged_select(shared.select, own.select))
        source = await asyncio.to_thread(EnvSource, name, env, config, True, eval_seed(config))
        if source.endless:
            path = f"eval.env.{name}.select.limit"
            raise ValueError(f"eval.env.{name}: its tasks never end; set {path}=32, or eval.select.limit")
        stack.push_async_callback(source.close)
        sources.append(_source(source, env, shared, base_url, model))
        succession = Succession(run, f"env/eval/{name}", config.cluster.start_timeout)
        await source.start(await succession.next(), succession.next)
    return sources


def _source(
    source: EnvSource, env: EvalEnvConfig, shared: OnlineEvalConfig, base_url: str, model: str
) -> EvalSource:
    return EvalSource(
        env=source.name,
        run=source.run,
        tasks=list(source.tasks),
        group_size=env.group_size or shared.group_size,
        interval=env.interval or shared.interval,
        sampling=sampling_values(merged_sampling(shared.sampling, env.sampling)),
        timeout=env.timeout,
        base_url=base_url,
        model=model,
    )
