"""Evaluations while training: which are due at a policy version, what is left to do, what came out.

`Evals` decides and keeps the books; whoever owns the engines starts the rollouts that it hands out
(`take`, `finish`): the orchestrator's dispatcher, or `prl.orchestrator.eval_run` where nothing else runs.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from prl.orchestrator.eval_metrics import eval_metrics
from prl.orchestrator.mixing import Task
from prl.orchestrator.window import Fact
from prl.records import Episode

log = logging.getLogger(__name__)

Report = Callable[[dict[str, float], int], object]
Record = Callable[[Episode, int], object]


@dataclass(frozen=True)
class EvalSource:
    """One environment to evaluate on. `run` is `prl.env.source.EnvSource.run`; `interval` in versions."""

    env: str
    run: Callable[..., Awaitable[Episode]]
    tasks: Sequence[Task]
    group_size: int
    interval: int
    sampling: Mapping[str, Any]
    timeout: float
    base_url: str
    model: str


@dataclass(eq=False, slots=True)
class EvalResult:
    """A rollout that ended: its place in the epoch, the version at its start, and what metrics need."""

    task: int
    rollout: int
    version: int
    facts: list[Fact]

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> EvalResult:
        facts = [Fact(**{**fact, "counts": tuple(fact["counts"])}) for fact in state["facts"]]
        return cls(state["task"], state["rollout"], state["version"], facts)


@dataclass(eq=False, slots=True)
class EvalEpoch:
    """Every rollout of one environment, due at `version`."""

    source: EvalSource
    version: int
    results: list[EvalResult] = field(default_factory=list)
    left: deque[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        places = [(t, r) for t in range(len(self.source.tasks)) for r in range(self.source.group_size)]
        done = {(result.task, result.rollout) for result in self.results}
        self.left = deque(place for place in places if place not in done)

    @property
    def size(self) -> int:
        return len(self.source.tasks) * self.source.group_size

    @property
    def complete(self) -> bool:
        return len(self.results) == self.size

    def state_dict(self) -> dict[str, Any]:
        results = [asdict(result) for result in self.results]
        return {"env": self.source.env, "version": self.version, "results": results}


@dataclass(eq=False, slots=True)
class EvalJob:
    """One rollout to do, and where its result goes."""

    epoch: EvalEpoch
    task: int
    rollout: int

    @property
    def env(self) -> str:
        return self.epoch.source.env

    @property
    def group_id(self) -> str:
        return f"eval-{self.epoch.version}-{self.task}"


class Evals:
    """The evaluations of a run.

    `last`: the version at which every environment is due (None: no end). `report(values, version)` gets
    `eval/<env>/*` when an epoch is complete, `record(episode, version)` every episode. With `pinned`, the
    caller promises not to change weights while `idle` is False.
    """

    def __init__(
        self,
        sources: Sequence[EvalSource],
        *,
        last: int | None,
        pinned: bool,
        report: Report,
        record: Record = lambda episode, version: None,
    ) -> None:
        self._sources = {source.env: source for source in sources}
        self._last = last
        self._pinned = pinned
        self._report = report
        self._record = record
        self._open: deque[EvalEpoch] = deque()
        self._seen: int | None = None

    @property
    def idle(self) -> bool:
        """Nothing to do, nothing in flight."""
        return not self._open

    @property
    def wanted(self) -> bool:
        """Whether there is anything to evaluate on."""
        return bool(self._sources)

    @property
    def waiting(self) -> int:
        """Rollouts that were not started yet."""
        return sum(len(epoch.left) for epoch in self._open)

    def is_due(self, version: int) -> bool:
        """Whether some environment wants this very version."""
        every = bool(self._sources) and version == self._last
        return every or any(version % source.interval == 0 for source in self._sources.values())

    def start(self, version: int, *, fresh: bool, skip_first: bool = False, retrigger: bool = False) -> None:
        """The first version is served: all are due in a fresh run (unless `skip_first`); on resume those that
        the restored state still owes, and with `retrigger` those due at `version` itself."""
        owed = {epoch.source.env: epoch for epoch in self._open}
        self._open.clear()
        for env, source in self._sources.items():
            missed = (
                self._seen is not None and (version - 1) // source.interval > self._seen // source.interval
            )
            again = retrigger and (version % source.interval == 0 or version == self._last)
            if (fresh and not skip_first) or missed or again or env in owed:
                self._begin(source, version, self._kept(owed.get(env)))
        self._seen = version

    def trigger(self, version: int) -> None:
        """A newer version is served. An interval that ended between two applied versions is not lost."""
        before = version - 1 if self._seen is None else self._seen
        for source in self._sources.values():
            crossed = version // source.interval > before // source.interval
            if crossed or version == self._last:
                self._begin(source, version)
        self._seen = version

    def take(self) -> EvalJob | None:
        """The next rollout to start, environments in turn; None when all were started."""
        for _ in range(len(self._open)):
            epoch = self._open[0]
            self._open.rotate(-1)
            if epoch.left:
                return EvalJob(epoch, *epoch.left.popleft())
        return None

    def finish(self, job: EvalJob, episode: Episode) -> None:
        """Book a rollout, `episode.policy` set. The last one of an epoch reports it."""
        if job.epoch not in self._open:
            return  # abandoned meanwhile
        assert episode.policy is not None, "the caller stamps the policy span"
        self._record(episode, job.epoch.version)
        facts = [Fact.of(trace, trainable=False, admitted=False) for trace in episode.traces]
        job.epoch.results.append(EvalResult(job.task, job.rollout, episode.policy.start, facts))
        if job.epoch.complete:
            self._open.remove(job.epoch)
            self._publish(job.epoch)

    def abandon(self) -> None:
        """Give up what is unfinished; what came in of it is reported with its `coverage`."""
        unfinished, self._open = list(self._open), deque()
        for epoch in unfinished:
            log.warning(
                "eval/%s at v%d: given up after %d of %d rollouts",
                epoch.source.env, epoch.version, len(epoch.results), epoch.size,
            )  # fmt: skip
            if epoch.results:
                self._publish(epoch)

    def state_dict(self) -> dict[str, Any]:
        """JSON: the last version judged, and the unfinished epochs with their results."""
        return {"seen": self._seen, "open": [epoch.state_dict() for epoch in self._open]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Call before `start`. Epochs of environments that are not evaluated any more are dropped."""
        self._seen = state["seen"]
        self._open.clear()
        for saved in state["open"]:
            if source := self._sources.get(saved["env"]):
                results = [EvalResult.from_state(result) for result in saved["results"]]
                self._open.append(EvalEpoch(source, saved["version"], results))

    def _kept(self, epoch: EvalEpoch | None) -> list[EvalResult]:
        """Results that a restored epoch goes on with: none when it must be of one version."""
        if epoch is None or not epoch.results:
            return []
        tasks, group = len(epoch.source.tasks), epoch.source.group_size
        fitting = [result for result in epoch.results if result.task < tasks and result.rollout < group]
        kept = [] if self._pinned else fitting
        log.info(
            "eval/%s: v%d was unfinished, %d of its %d rollouts are kept",
            epoch.source.env, epoch.version, len(kept), len(epoch.results),
        )  # fmt: skip
        return kept

    def _begin(self, source: EvalSource, version: int, results: list[EvalResult] | None = None) -> None:
        log.info("eval/%s: v%d is due, %d tasks", source.env, version, len(source.tasks))
        epoch = EvalEpoch(source, version, results or [])
        if epoch.complete:
            self._publish(epoch)
        else:
            self._open.append(epoch)

    def _publish(self, epoch: EvalEpoch) -> None:
        source, versions = epoch.source, sorted({result.version for result in epoch.results})
        if len(versions) > 1:
            log.warning(
                "eval/%s due at v%d mixes versions %d to %d",
                source.env,
                epoch.version,
                versions[0],
                versions[-1],
            )
        found = [(source.tasks[result.task].key, result.facts) for result in epoch.results]
        values = eval_metrics(source.env, found, source.group_size, versions[0], epoch.size)
        self._report(values, epoch.version)
        rewards = [
            v
            for name, v in values.items()
            if name.startswith(f"eval/{source.env}/effective/") and "/avg@" in name
        ]
        log.info(
            "eval/%s at v%d: %s",
            source.env,
            epoch.version,
            ", ".join(f"{v:.4g}" for v in rewards) or "no reward",
        )


def no_evals() -> Evals:
    """Nothing to evaluate on."""
    return Evals([], last=None, pinned=False, report=lambda values, version: None)
