"""Evaluation rollouts in the dispatcher: they go before those of training and ignore its lead."""

from __future__ import annotations

import asyncio
from collections import Counter

from prl.orchestrator.eval_epoch import EvalJob, Evals
from prl.orchestrator.eval_run import roll
from prl.orchestrator.pipeline import Pipeline


class EvalFlights:
    """Starts what `evals` hands out, at most `cap` at once (None: as many as the dispatcher lets)."""

    def __init__(
        self,
        evals: Evals,
        pipeline: Pipeline,
        *,
        cap: int | None = None,
        fatal: tuple[type[Exception], ...] = (),
    ) -> None:
        self._evals = evals
        self._pipeline = pipeline
        self._cap = cap
        self._fatal = fatal
        self.inflight = 0
        self.errored: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Rollouts that were not started yet."""
        return self._evals.waiting

    @property
    def wanted(self) -> bool:
        """Whether this run evaluates at all."""
        return self._evals.wanted

    def may_start(self) -> bool:
        room = self._cap is None or self.inflight < self._cap
        return room and not self._pipeline.updating and self.waiting > 0

    def start(self, tasks: asyncio.TaskGroup) -> None:
        job = self._evals.take()
        assert job is not None, "nothing waits"
        self.inflight += 1
        tasks.create_task(self._fly(job))

    async def _fly(self, job: EvalJob) -> None:
        line = self._pipeline
        try:
            episode = await roll(job, line.version, lambda: line.version, self._fatal)
        finally:
            self.inflight -= 1
        self.errored[job.env] += any(trace.error for trace in episode.traces)
        self._evals.finish(job, episode)
        line.notify()
