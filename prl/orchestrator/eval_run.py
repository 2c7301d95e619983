"""Runs the rollouts of evaluations: one at a time for a dispatcher, or all that is due at one version."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from prl.env.convert import mark_failed
from prl.orchestrator.episodes import GRACE, failed_rollout
from prl.orchestrator.eval_epoch import EvalJob, Evals
from prl.records import Episode, PolicySpan, TraceError

log = logging.getLogger(__name__)


async def roll(
    job: EvalJob, version: int, current: Callable[[], int], fatal: tuple[type[Exception], ...] = ()
) -> Episode:
    """Run one job at policy `version`; `current()` gives the version when it ends. Failures come back as
    episodes with an error, except `fatal` ones."""
    source, task = job.epoch.source, job.epoch.source.tasks[job.task]
    started_at = time.time()
    try:
        async with asyncio.timeout(source.timeout + GRACE):
            episode = await source.run(
                task, group_id=job.group_id, base_url=source.base_url, model=source.model,
                sampling=dict(source.sampling), train=False, cache_salt=f"v{version}",
            )  # fmt: skip
    except fatal:
        raise
    except Exception as error:
        log.debug("eval/%s: rollout failed", source.env, exc_info=error)
        episode = failed_rollout(source.env, job.group_id, task, error, started_at)
    if not episode.traces:
        mark_failed(episode, TraceError("EmptyEpisode", "the episode has no trace"))
    elif any(trace.error for trace in episode.traces):
        mark_failed(episode, TraceError("EpisodeFailed", "another trace of the episode failed"))
    episode.policy = PolicySpan(version, current())
    return episode


async def run_epochs(
    evals: Evals, version: int, inflight: int, fatal: tuple[type[Exception], ...] = ()
) -> None:
    """Do all that is due, `inflight` rollouts at once, while the engines serve `version` throughout.

    Cancelling it cancels the rollouts; call `evals.abandon()` then. Raises what `fatal` names.
    """

    async def work() -> None:
        while (job := evals.take()) is not None:
            evals.finish(job, await roll(job, version, lambda: version, fatal))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(inflight, evals.waiting)):
            tasks.create_task(work())
