"""A virtual clock, and scripted stand-ins for environments, engines, trainer and algorithms."""

from __future__ import annotations

import asyncio
import itertools
import selectors
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prl.algo.samples import BuiltSamples
from prl.orchestrator.concurrency import FixedLimit, Limit
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.episodes import Outcome, RolloutSource
from prl.orchestrator.eval_epoch import Evals, EvalSource
from prl.orchestrator.eval_flights import EvalFlights
from prl.orchestrator.loop import MainLoop, Parts
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.sink import Sink
from prl.orchestrator.state import Totals
from prl.orchestrator.watcher import Watcher
from prl.records import Episode, Node, Trace, TraceError, TrainSample, WeightVersion

T = TypeVar("T")


class _VirtualSelector(selectors.DefaultSelector):
    """Never sleeps: what the loop would wait for passes at once on the virtual clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise RuntimeError("deadlock: every task waits and no timer is set")
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose seconds cost nothing; every run of a scenario is the same."""

    def __init__(self) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtual(main: Coroutine[Any, Any, T], limit: float = 10_000.0) -> T:
    """Run `main` on a virtual clock, at most `limit` virtual seconds."""

    async def bounded() -> T:
        async with asyncio.timeout(limit):
            return await main

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(bounded())


async def inline(function: Callable[..., T], *args: Any) -> T:
    """Stands for `asyncio.to_thread`."""
    return function(*args)


def now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class FakeTask:
    key: str
    data: dict[str, Any] = field(default_factory=dict)


class FakeCurriculum:
    """Tasks `<env>0`, `<env>1`, ... in order; `refused` keys are not admitted."""

    def __init__(self, env: str, refused: Sequence[str] = ()) -> None:
        self.env = env
        self.cursor = 0
        self.refused = refused
        self.told: list[list[Episode]] = []

    def draw(self) -> FakeTask:
        self.cursor += 1
        key = f"{self.env}{self.cursor - 1}"
        return FakeTask(key, {"prompt": key})

    def admit(self, group: Sequence[Episode]) -> bool:
        assert group and len({episode.task_key for episode in group}) == 1
        self.told.append(list(group))
        return group[0].task_key not in self.refused

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/{self.env}/sampler/cursor": float(self.cursor)}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]


class FakeGrpo:
    """Reward minus group mean, written by hand; remembers what it was shown."""

    action_loss = "rl"

    def __init__(self) -> None:
        self.scored: list[str] = []
        self.groups: list[list[str]] = []
        self.delay = 0.0

    async def score_episode(self, episode: Episode) -> None:
        await asyncio.sleep(self.delay)
        self.scored.append(episode.id)

    def metrics(self) -> dict[str, float]:
        return {}

    async def score_group(self, episodes: list[Episode]) -> None:
        self.groups.append([episode.id for episode in episodes])
        traces = [trace for episode in episodes for trace in episode.trainable_traces]
        mean = sum(trace.reward or 0.0 for trace in traces) / len(traces)
        for trace in traces:
            for node in trace.nodes:
                node.advantages = [(trace.reward or 0.0) - mean] * node.num_sampled

    def state_dict(self) -> dict[str, Any]:
        return {"scored": len(self.scored)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restored = state


def make_trace(
    name: str, reward: float | None = 1.0, *, sampled: int = 3, agent: str = "agent", error: str | None = None
) -> Trace:
    """One prompt of two tokens, one completion of `sampled` tokens."""
    nodes = [
        Node(None, "user", False, [5, 6], [False, False], []),
        Node(0, "assistant", True, list(range(10, 10 + sampled)), [True] * sampled, [-0.5] * sampled),
    ]
    problem = TraceError(error, "scripted") if error else None
    return Trace(name, agent, nodes, [[0, 1]], reward, error=problem, num_turns=1, is_completed=True)


_numbers = itertools.count()


def make_episode(
    task_key: str = "a0", reward: float | None = 1.0, *, env: str = "a", group_id: str = "1-0", **kwargs: Any
) -> Episode:
    name = f"e{next(_numbers)}"
    trace = make_trace(f"{name}-0", reward, **kwargs)
    return Episode(name, env, group_id, task_key, {}, [trace])


def build_sample(env: str, trace: Trace) -> BuiltSamples:
    """One sample of a trace with credit, none of one without."""
    if not trace.advantage:
        return BuiltSamples([], 0)
    tokens = [token for node in trace.nodes for token in node.token_ids]
    mask = [flag for node in trace.nodes for flag in node.mask]
    sample = TrainSample(
        tokens, mask, [-0.5 * m for m in mask], [1.0] * len(tokens), env, trace.id,
        advantages=[(trace.advantage or 0.0) * m for m in mask],
    )  # fmt: skip
    return BuiltSamples([sample], 0)


@dataclass
class Call:
    """What one rollout was asked, and when."""

    task_key: str
    group_id: str
    cache_salt: str | None
    version: int
    step: int
    at: float
    base_url: str = ""
    order: int = field(default_factory=lambda: next(_numbers))


class FakeEnv:
    """Rollouts of scripted duration and reward; alternates rewards within a group unless told otherwise."""

    def __init__(
        self,
        name: str = "a",
        *,
        seconds: Callable[[int], float] = lambda number: 1.0,
        outcome: Callable[[int], float | Exception | Episode | None] = lambda number: float(number % 2),
    ) -> None:
        self.name = name
        self.seconds = seconds
        self.outcome = outcome
        self.calls: list[Call] = []
        self.cancelled = 0
        self.line: Pipeline | None = None

    async def run(
        self, task: Any, *, group_id: str, base_url: str, cache_salt: str | None, **_: Any
    ) -> Episode:
        number = len(self.calls)
        line = self.line or Pipeline(1, 0)
        self.calls.append(Call(task.key, group_id, cache_salt, line.version, line.step, now(), base_url))
        try:
            await asyncio.sleep(self.seconds(number))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        result = self.outcome(number)
        if isinstance(result, Exception):
            raise result
        if isinstance(result, Episode):
            return result
        return make_episode(task.key, result, env=self.name, group_id=group_id)

    def source(self, group_size: int = 2, **kwargs: Any) -> RolloutSource:
        values = {
            "sampling": {"temperature": 1.0},
            "timeout": 300.0,
            "base_url": "http://policy/v1",
            "model": "tiny",
        }
        return RolloutSource(env=self.name, run=self.run, group_size=group_size, **{**values, **kwargs})


def eval_source(env: FakeEnv, tasks: int = 3, group_size: int = 2, interval: int = 2) -> EvalSource:
    """Evaluations on `env` with tasks `<env>0`, `<env>1`, ..."""
    found = [FakeTask(f"{env.name}{i}", {"prompt": str(i)}) for i in range(tasks)]
    return EvalSource(env.name, env.run, found, group_size, interval, {}, 300.0, "http://policy/v1", "tiny")


class FakeEngine:
    """Admin routes that note their calls; `fail` maps a route to what it raises."""

    def __init__(self, seconds: float = 0.1, fail: Mapping[str, Exception] | None = None) -> None:
        self.seconds = seconds
        self.fail = dict(fail or {})
        self.calls: list[tuple[str, float]] = []
        self.fingerprint: Callable[[int], str] = lambda version: f"print-{version}"

    async def pause(self) -> None:
        await self._note("pause")

    async def resume(self) -> None:
        await self._note("resume")

    async def update_weights(self, weight_dir: str, version: int) -> dict[str, Any]:
        await self._note("update")
        return {"version": version, "fingerprint": self.fingerprint(version), "seconds": self.seconds}

    async def _note(self, route: str) -> None:
        self.calls.append((route, now()))
        await asyncio.sleep(self.seconds / 3)
        if error := self.fail.get(route):
            raise error


def published(version: int) -> WeightVersion:
    return WeightVersion(version, f"/nowhere/step_{version}", f"print-{version}", 1000)


class FakeTrainer:
    """Outbox and trainer in one: trains each batch for `seconds(step)`, then publishes the next version."""

    def __init__(self, first_step: int = 1, seconds: Callable[[int], float] = lambda step: 1.0) -> None:
        self.newest = published(first_step - 1)
        self.seconds = seconds
        self.shipped: dict[int, Any] = {}
        self.shipped_at: dict[int, float] = {}
        self._next = first_step
        self._arrived = asyncio.Event()

    async def put(self, step: int, messages: Any) -> None:
        assert step == self._next + len(self.shipped) - self._trained, "batches are shipped in order"
        self.shipped[step] = messages
        self.shipped_at[step] = now()
        self._arrived.set()

    async def serve(self) -> None:
        while True:
            while self._next not in self.shipped:
                self._arrived.clear()
                await self._arrived.wait()
            await asyncio.sleep(self.seconds(self._next))
            self.newest = published(self._next)
            self._next += 1

    @property
    def _trained(self) -> int:
        return sum(1 for step in self.shipped if step < self._next)


class Recorder:
    """Takes metrics and traces and keeps them."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, float]]] = []
        self.episodes: list[Episode] = []
        self.annotated: dict[int, list[str]] = {}

    def log(self, values: Mapping[str, float | None], step: int | None = None) -> None:
        self.rows.append((step, dict(values)))

    def add(self, episode: Episode) -> None:
        self.episodes.append(episode)

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def flush(self) -> None:
        return

    async def annotate(self, shipped: Sequence[Any], step: int) -> None:
        self.annotated[step] = [entry.trace.id for entry in shipped]

    def of_step(self, step: int) -> dict[str, float]:
        return {name: value for at, row in self.rows if at == step for name, value in row.items()}

    def series(self, name: str) -> list[float]:
        return [row[name] for _, row in self.rows if name in row]


class Scenario:
    """The whole orchestrator around fakes. `await scenario.run()` trains to `max_steps`."""

    def __init__(
        self,
        *envs: FakeEnv,
        max_steps: int | None = 5,
        batch_size: int = 4,
        group_size: int = 2,
        bound: int = 8,
        cap: int | None = None,
        constant: bool = True,
        first_step: int = 1,
        trainer_seconds: Callable[[int], float] = lambda step: 1.0,
        engine: FakeEngine | None = None,
        sources: Mapping[str, Mapping[str, Any]] | None = None,
        save: Callable[[int], Awaitable[None]] | None = None,
        fatal: tuple[type[Exception], ...] = (),
        seed: int = 0,
        patience: float = 1000.0,
        limit: Limit | None = None,
        tasks_per_minute: float | None = None,
        max_barren: int | None = None,
        evals: Sequence[EvalSource] = (),
        pinned: bool = True,
        eval_cap: int | None = None,
        skip_first: bool = False,
    ) -> None:
        self.envs = {env.name: env for env in envs or (FakeEnv(),)}
        self.line = Pipeline(first_step, first_step - 1)
        for env in self.envs.values():
            env.line = self.line
        self.engine = engine or FakeEngine()
        self.trainer = FakeTrainer(first_step, trainer_seconds)
        self.recorder = Recorder()
        self.algorithms = {name: FakeGrpo() for name in self.envs}
        self.curricula = {name: FakeCurriculum(name) for name in self.envs}
        self.mixer = TaskMixer(self.curricula, dict.fromkeys(self.envs, 1.0), seed)
        self.inbox: asyncio.Queue[Outcome] = asyncio.Queue()
        self.totals = Totals()
        self.statuses: list[int] = []
        self.sink = Sink(
            self.algorithms, self.curricula, build_sample, self.mixer, self.line,
            batch_size=batch_size, bound=bound, constant=constant, record=self.recorder.add, offload=inline,
            max_barren=max_barren,
        )  # fmt: skip
        self.evals = Evals(evals, last=max_steps, pinned=pinned, report=self.recorder.log)
        self.skip_first = skip_first
        overrides = sources or {}
        self.dispatcher = Dispatcher(
            {name: env.source(group_size, **overrides.get(name, {})) for name, env in self.envs.items()},
            self.mixer, self.line, limit=limit or FixedLimit(cap or batch_size),
            bound=bound, batch_size=batch_size,
            inbox=self.inbox, arrive=self.sink.arrive, fatal=fatal, tasks_per_minute=tasks_per_minute,
            evals=EvalFlights(self.evals, self.line, cap=eval_cap, fatal=fatal),
            settling=lambda: self.sink.settling, queued=lambda: self.sink.queued,
        )  # fmt: skip
        self.watcher = Watcher(
            [self.engine], self.line,
            newest=lambda: self.trainer.newest, announce=self.dispatcher.cancel_stale,
            report=self.recorder.log, offload=inline,
            held=lambda: pinned and not self.evals.idle, applied=self.evals.trigger,
        )  # fmt: skip

        async def no_save(step: int) -> None:
            return

        self.parts = Parts(
            self.line, self.dispatcher, self.sink, self.inbox, self.watcher, self.trainer,
            self.recorder, self.recorder, lambda step, samples: [samples], save or no_save, self.totals,
            self.evals,
        )  # fmt: skip
        self.loop = MainLoop(
            self.parts, max_steps=max_steps, patience=patience, leaving=self.statuses.append, offload=inline
        )

    async def run(self) -> None:
        if self.evals.wanted:
            version = self.line.version
            self.evals.start(version, fresh=version == 0, skip_first=self.skip_first)
        await self.loop.run()

    @property
    def env_cancelled(self) -> int:
        return sum(env.cancelled for env in self.envs.values())

    @property
    def calls(self) -> list[Call]:
        """All rollouts in the order in which they were started."""
        calls = [call for env in self.envs.values() for call in env.calls]
        return sorted(calls, key=lambda call: call.order)
