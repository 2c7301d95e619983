"""Runs the rollouts of an evaluation: so many at once, each until it is in the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from prl.config.schema import EvalConfig
from prl.env.convert import mark_failed
from prl.evals.ledger import Ledger
from prl.evals.progress import Progress
from prl.evals.retries import (
    LOST_IN_A_ROW,
    Backoff,
    EndpointRefused,
    RateLimit,
    first_error,
    is_passing,
    is_refusal,
)
from prl.evals.sources import Key
from prl.records import Episode, TraceError

log = logging.getLogger(__name__)


class Task(Protocol):
    """`prl.env.source.Task`."""

    @property
    def key(self) -> str: ...


class Env(Protocol):
    """`prl.env.source.EnvSource`, as far as rollouts need it."""

    async def run(
        self,
        task: Any,
        *,
        group_id: str,
        base_url: str,
        model: str,
        sampling: dict[str, Any],
        train: bool,
        cache_salt: str | None,
    ) -> Episode: ...


@dataclass(frozen=True)
class Source:
    """One environment, ready to run: the tasks to do and how often."""

    env: Env
    tasks: list[Any]
    group_size: int
    sampling: dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One rollout to do."""

    key: Key
    task: Any


class Runner:
    """All rollouts of one evaluation, checkpoint after checkpoint."""

    def __init__(
        self,
        config: EvalConfig,
        sources: Mapping[str, Source],
        base_url: str,
        ledger: Ledger,
        progress: Progress,
    ) -> None:
        self.config, self.sources, self.base_url = config, sources, base_url
        self.ledger, self.progress = ledger, progress
        self._limit = RateLimit(config.eval.rollouts_per_minute)
        self._backoff = Backoff(config.eval, config.seed)
        self._lost = 0

    def jobs(self, step: int) -> Iterator[Job]:
        """Every rollout of checkpoint `step`, source by source, all rollouts of a task together."""
        for env, source in self.sources.items():
            for task in source.tasks:
                for rollout in range(source.group_size):
                    yield Job(Key(step, env, task.key, rollout), task)

    async def run(self, step: int) -> None:
        """Do what is missing of checkpoint `step`. Raises EndpointRefused, EnvServerDied."""
        missing = iter([job for job in self.jobs(step) if job.key not in self.ledger.settled])
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.config.concurrency):
                    group.create_task(self._work(missing))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first to fail ended the others

    async def _work(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            count = self.progress.counts[job.key.step, job.key.env]
            count.running += 1
            try:
                episode, retries = await self._finish(job)
                await self.ledger.append(job.key, episode, retries)
            finally:
                count.running -= 1
            failed = first_error(episode) is not None
            rewards = [trace.reward for trace in episode.traces if trace.reward is not None and not failed]
            count.add(rewards, failed)

    async def _finish(self, job: Job) -> tuple[Episode, int]:
        """(the episode to count, repetitions before it)."""
        for attempt in range(self.config.eval.retries + 1):
            if attempt:
                await asyncio.sleep(self._backoff.seconds(attempt))
            await self._limit.wait()
            episode = await self._roll(job)
            error = first_error(episode)
            if error is None or not is_passing(error):
                break
            log.warning("%s, try %d: %s: %s", _name(job), attempt + 1, error.type, error.message[:200])
        if error is not None and is_refusal(error):
            raise EndpointRefused(f"{self.base_url} refuses ({error.status}): {_line(error.message)}")
        self._watch_losses(error is not None and is_passing(error), error.message if error else "")
        return episode, attempt

    async def _roll(self, job: Job) -> Episode:
        source, step = self.sources[job.key.env], job.key.step
        episode = await source.env.run(
            job.task,
            group_id=f"{step}:{job.key.env}:{job.key.task[:16]}",
            base_url=self.base_url,
            model=self.config.model.name,
            sampling=source.sampling,
            train=False,
            cache_salt=f"step_{step}" if step else None,
        )
        if not episode.traces:
            mark_failed(episode, TraceError("EmptyEpisode", "the episode has no trace"))
        return episode

    def _watch_losses(self, lost: bool, reason: str) -> None:
        """Stop when the endpoint answers nobody any more, instead of failing thousands of rollouts."""
        self._lost = self._lost + 1 if lost else 0
        if self._lost >= LOST_IN_A_ROW:
            raise EndpointRefused(
                f"{self.base_url}: the last {self._lost} rollouts failed after all retries: {_line(reason)}"
            )


def _name(job: Job) -> str:
    return f"{job.key.env} {job.key.task[:12]} rollout {job.key.rollout}"


def _line(text: str) -> str:
    return " ".join(text.split())[:300]
