"""Starting, finishing, failing and cancelling rollouts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from orchestrator_fakes import FakeCurriculum, FakeEnv, make_episode, make_trace, run_virtual

from prl.orchestrator.concurrency import FixedLimit
from prl.orchestrator.dispatcher import GRACE, Dispatcher
from prl.orchestrator.episodes import Outcome
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.pipeline import Pipeline
from prl.records import Episode, PolicySpan


class ServerDied(RuntimeError):
    pass


class Bench:
    """A dispatcher alone: its inbox is read by the test."""

    def __init__(self, env: FakeEnv, *, cap: int = 4, bound: int = 8, step: int = 1, **source: Any) -> None:
        self.env = env
        self.line = env.line = Pipeline(step, step - 1)
        self.inbox: asyncio.Queue[Outcome] = asyncio.Queue()
        self.arrived: list[Episode] = []
        self.queued = self.settling = 0
        self.score: Callable[[Episode], Any] | None = None
        self.mixer = TaskMixer({env.name: FakeCurriculum(env.name)}, {env.name: 1.0}, 0)
        self.dispatcher = Dispatcher(
            {env.name: env.source(**source)}, self.mixer, self.line, limit=FixedLimit(cap),
            bound=bound, batch_size=4,
            inbox=self.inbox, arrive=self._arrive, settling=lambda: self.settling, queued=lambda: self.queued,
            fatal=(ServerDied,), attempt=3,
        )  # fmt: skip

    async def _arrive(self, episode: Episode) -> None:
        self.arrived.append(episode)
        if self.score:
            await self.score(episode)

    async def during(self, seconds: float, *events: tuple[float, Callable[[], Any]]) -> list[Outcome]:
        """Run for a while, calling `events` at their times; returns all outcomes."""
        task = asyncio.create_task(self.dispatcher.run())
        for at, event in sorted(events, key=lambda item: item[0]):
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            event()
        await asyncio.wait({task}, timeout=seconds - asyncio.get_running_loop().time())
        if task.done():
            await task
        self.line.draining = True
        self.line.notify()
        await task
        return [self.inbox.get_nowait() for _ in range(self.inbox.qsize())]

    def set_version(self, version: int) -> Callable[[], None]:
        def event() -> None:
            self.line.version = version
            self.line.notify()

        return event


def bench(**kwargs: Any) -> Bench:
    env = FakeEnv(**{key: kwargs.pop(key) for key in ("seconds", "outcome") if key in kwargs})
    return Bench(env, **kwargs)


def forever(number: int) -> float:
    return 1e9


def test_the_cap_bounds_what_is_in_flight() -> None:
    async def scenario() -> tuple[int, int]:
        it = bench(cap=3, seconds=forever)
        task = asyncio.create_task(it.during(5))
        await asyncio.sleep(1)
        seen = it.dispatcher.inflight
        await task
        return seen, len(it.env.calls)

    assert run_virtual(scenario()) == (3, 3)


def test_an_open_group_goes_on_before_a_new_one_opens() -> None:
    async def scenario() -> list[str]:
        it = bench(cap=5, seconds=forever, group_size=3)
        await it.during(1)
        return [call.task_key for call in it.env.calls]

    assert run_virtual(scenario()) == ["a0", "a0", "a0", "a1", "a1"]


def test_every_started_episode_becomes_one_outcome() -> None:
    async def scenario() -> None:
        it = bench(cap=4, seconds=lambda n: 1.0 + n % 3)
        outcomes = await it.during(20.5)
        cut_short = it.env.cancelled
        assert len(outcomes) + cut_short == len(it.env.calls) and 0 < cut_short <= 4
        ids = [outcome.episode.id for outcome in outcomes if outcome.episode]
        assert len(set(ids)) == len(ids) == len(it.arrived)

    run_virtual(scenario())


def test_group_ids_tell_attempt_and_draw() -> None:
    async def scenario() -> list[str]:
        it = bench(cap=4, seconds=forever)
        await it.during(1)
        return [call.group_id for call in it.env.calls]

    assert run_virtual(scenario()) == ["3-0", "3-0", "3-1", "3-1"]


def test_p3_the_salt_is_that_of_the_episodes_own_start() -> None:
    async def scenario() -> None:
        it = bench(cap=2, group_size=4, seconds=lambda n: 10.0, step=2)
        it.line.version = 0
        outcomes = await it.during(25, (5, it.set_version(1)))
        calls = [call for call in it.env.calls if call.group_id == "3-0"]
        assert [call.cache_salt for call in calls] == ["v0", "v0", "v1", "v1"]
        spans = [outcome.episode.policy for outcome in outcomes if outcome.group.id == "3-0"]
        assert spans == [PolicySpan(0, 1), PolicySpan(0, 1), PolicySpan(1, 1), PolicySpan(1, 1)]

    run_virtual(scenario())


def test_a_frozen_source_has_no_salt_no_span_and_its_own_endpoint() -> None:
    async def scenario() -> None:
        it = bench(frozen=True, base_url="http://teacher/v1", cap=2)
        outcomes = await it.during(1.5)
        assert {call.cache_salt for call in it.env.calls} == {None}
        assert {call.base_url for call in it.env.calls} == {"http://teacher/v1"}
        assert [outcome.episode.policy for outcome in outcomes] == [None, None]
        it.line.step = 50
        assert it.dispatcher.cancel_stale() == 0

    run_virtual(scenario())


@pytest.mark.parametrize(("version", "started"), [(0, 0), (1, 4)])
def test_the_gate_is_closed_while_the_policy_lags(version: int, started: int) -> None:
    async def scenario() -> int:
        it = bench(step=3, seconds=forever)
        it.line.version = version
        await it.during(5)
        return len(it.env.calls)

    assert run_virtual(scenario()) == started


def test_nothing_starts_while_the_engines_change_weights() -> None:
    async def scenario() -> list[float]:
        it = bench(seconds=forever)
        it.line.updating = True

        def done() -> None:
            it.line.updating = False
            it.line.notify()

        await it.during(5, (3, done))
        return [call.at for call in it.env.calls]

    assert run_virtual(scenario()) == [3.0] * 4


def test_what_would_be_too_old_for_its_batch_is_not_started() -> None:
    async def scenario(backlog: int) -> int:
        it = bench(cap=8, bound=0, seconds=forever)
        it.queued = backlog
        await it.during(5)
        return len(it.env.calls)

    assert run_virtual(scenario(0)) == 4, (
        "one batch of four at this version; more would be stale for the next"
    )
    assert run_virtual(scenario(3)) == 2, "a group that was begun is finished"


def test_stale_episodes_are_cancelled_each_on_its_own() -> None:
    async def scenario() -> None:
        it = bench(cap=4, group_size=4, bound=1, step=2, seconds=lambda n: 30.0 if n < 2 else 1e9)
        it.line.version = 0
        late = []

        def next_step() -> None:
            it.line.step, it.line.version = 4, 2
            late.append(it.dispatcher.cancel_stale())

        outcomes = await it.during(50, (10, it.set_version(1)), (40, next_step))
        # two of version 0 finish at 30; the two that follow them start at version 1
        assert late == [4] and it.dispatcher.inflight == 0
        reasons = Counter(outcome.episode is None for outcome in outcomes)
        assert reasons[True] == 4 and it.dispatcher.cancelled["a"] == 4
        assert it.env.cancelled >= 4

    run_virtual(scenario())


def test_only_those_older_than_the_bound_are_cancelled() -> None:
    async def scenario() -> list[int]:
        it = bench(cap=4, group_size=2, bound=1, step=2, seconds=lambda n: 5.0 if n < 2 else 1e9)
        it.line.version = 0
        counts = []
        task = asyncio.create_task(it.during(50, (3, it.set_version(1))))
        await asyncio.sleep(8)  # two are of version 0, two of version 1
        assert sorted(call.version for call in it.env.calls) == [0, 0, 0, 0, 1, 1]
        counts.append(it.dispatcher.cancel_stale())
        it.line.step, it.line.version = 3, 2
        counts.append(it.dispatcher.cancel_stale())
        await task
        return counts

    assert run_virtual(scenario()) == [0, 2]


def test_p1_cancelling_never_waits_for_the_inbox() -> None:
    async def scenario() -> int:
        it = bench(cap=50, bound=1, seconds=forever)
        task = asyncio.create_task(it.during(5))
        await asyncio.sleep(1)
        started = it.dispatcher.inflight
        it.line.step, it.line.version = 9, 8
        assert it.dispatcher.cancel_stale() == started  # a plain call: it cannot block on a full queue
        assert it.inbox.qsize() == started
        await task
        return started

    assert run_virtual(scenario()) == 8


def test_a_cancelled_rollout_that_answers_anyway_counts_once() -> None:
    class Deaf(FakeEnv):
        async def run(self, *args: Any, **kwargs: Any) -> Episode:
            with contextlib.suppress(asyncio.CancelledError):
                return await super().run(*args, **kwargs)
            return make_episode()

    async def scenario() -> list[Outcome]:
        it = Bench(Deaf(seconds=forever), cap=1, bound=0)
        task = asyncio.create_task(it.during(5))
        await asyncio.sleep(1)
        it.line.step = 2
        it.dispatcher.cancel_stale()
        outcomes = await task
        assert it.arrived == [], "nobody scores or records what was cancelled"
        return outcomes

    outcomes = run_virtual(scenario())
    assert [outcome.episode for outcome in outcomes] == [None]


def test_an_environment_that_raises_is_counted_by_type_and_the_run_goes_on() -> None:
    def outcome(number: int) -> float | Exception:
        return KeyError("broken") if number % 2 else 1.0

    async def scenario() -> None:
        it = bench(cap=2, outcome=outcome)
        outcomes = await it.during(3.5)
        errors = Counter(t.error.type for o in outcomes for t in o.episode.traces if t.error)
        assert errors == {"KeyError": 3} and len(outcomes) == 6
        assert it.dispatcher.take_counts()["dispatcher/errored/a"] == 3
        failed = next(o.episode for o in outcomes if o.episode.traces[0].error)
        assert failed.group_id == "3-0" and failed.task_key == "a0" and failed.policy == PolicySpan(0, 0)
        assert not failed.trainable_traces

    run_virtual(scenario())


def test_an_environment_that_hangs_is_given_up() -> None:
    async def scenario() -> list[str]:
        it = bench(cap=1, seconds=forever, timeout=20.0)
        outcomes = await it.during(20 + GRACE + 1)
        return [trace.error.type for outcome in outcomes for trace in outcome.episode.traces]

    assert run_virtual(scenario()) == ["TimeoutError"]


def bad(**changes: Any) -> Callable[[int], Episode]:
    def outcome(number: int) -> Episode:
        trace = make_trace("t", 1.0)
        for name, value in changes.items():
            setattr(trace, name, value)
        return Episode(f"e{number}", "a", "3-0", f"a{number // 2}", {}, [trace])

    return outcome


@pytest.mark.parametrize(
    ("outcome", "error"),
    [
        (bad(reward=math.nan), "NonFiniteReward"),
        (bad(reward=math.inf), "NonFiniteReward"),
        (bad(reward=None), "NonFiniteReward"),
        (bad(rewards={"score": None}), "MissingReward"),
        (bad(num_turns=0), "EmptyTrajectory"),
        (lambda n: Episode(f"e{n}", "a", "3-0", f"a{n // 2}", {}, []), "EmptyEpisode"),
    ],
)
def test_silent_faults_become_counted_errors(outcome: Any, error: str) -> None:
    async def scenario() -> list[Outcome]:
        return await bench(cap=2, outcome=outcome).during(1.5)

    outcomes = run_virtual(scenario())
    assert [trace.error.type for o in outcomes for trace in o.episode.traces] == [error] * 2
    assert not any(o.episode.trainable_traces for o in outcomes)


@pytest.mark.parametrize(
    ("logprobs", "error"), [([-0.5], "MalformedLogprobs"), ([-0.5, math.nan, -0.5], "NonFiniteLogprob")]
)
def test_logprobs_that_cannot_be_trained_on_are_errors(logprobs: list[float], error: str) -> None:
    def outcome(number: int) -> Episode:
        episode = make_episode(f"a{number // 2}")
        episode.traces[0].nodes[1].logprobs = logprobs
        return episode

    async def scenario(**source: Any) -> list[Any]:
        outcomes = await bench(cap=2, outcome=outcome, **source).during(1.5)
        return [trace.error and trace.error.type for o in outcomes for trace in o.episode.traces]

    assert run_virtual(scenario()) == [error] * 2
    assert run_virtual(scenario(frozen=True)) == [None] * 2, "a teacher's logprobs are not used"


def test_one_failed_agent_fails_the_episode() -> None:
    def outcome(number: int) -> Episode:
        episode = make_episode(f"a{number // 2}")
        episode.traces.append(make_trace("second", 0.0, agent="other", error="ProviderError"))
        return episode

    async def scenario() -> list[list[str]]:
        outcomes = await bench(cap=2, outcome=outcome).during(1.5)
        return [[trace.error.type for trace in o.episode.traces] for o in outcomes]

    assert run_virtual(scenario()) == [["EpisodeFailed", "ProviderError"]] * 2


def test_an_answer_to_another_task_ends_the_run() -> None:
    async def scenario() -> None:
        await bench(outcome=lambda n: make_episode("another")).during(5)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(scenario())
    assert "was given task 'a0' and returned 'another'" in str(caught.value.exceptions[0])


def test_a_dead_environment_server_ends_the_run() -> None:
    async def scenario() -> None:
        await bench(outcome=lambda n: ServerDied("env/a is gone")).during(5)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(scenario())
    assert isinstance(caught.value.exceptions[0], ServerDied)


def test_a_scoring_hook_that_raises_ends_the_run() -> None:
    async def scenario() -> None:
        it = bench()

        async def score(episode: Episode) -> None:
            raise ConnectionError("teacher is gone")

        it.score = score
        await it.during(5)

    with pytest.raises(ExceptionGroup) as caught:
        run_virtual(scenario())
    assert isinstance(caught.value.exceptions[0], ConnectionError)


def test_scoring_counts_as_work_in_flight() -> None:
    async def scenario() -> int:
        it = bench(cap=2)

        async def score(episode: Episode) -> None:
            await asyncio.sleep(1e9)

        it.score = score
        await it.during(10)
        return len(it.env.calls)

    assert run_virtual(scenario()) == 2, "a slow teacher must not let finished rollouts pile up"


def test_groups_being_settled_hold_their_permits() -> None:
    async def scenario() -> int:
        it = bench(cap=6, seconds=forever)
        it.settling = 4
        await it.during(5)
        return len(it.env.calls)

    assert run_virtual(scenario()) == 2


def test_an_error_storm_is_slowed_down(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> int:
        it = bench(cap=4, seconds=lambda n: 0.0, outcome=lambda n: ConnectionError("refused"))
        await it.during(30.5)
        return len(it.env.calls)

    with caplog.at_level(logging.WARNING):
        calls = run_virtual(scenario())
    assert calls < 4 * 34, "a dead engine must not be asked as fast as the loop can turn"
    assert "rollouts all failed, most recently with ConnectionError: refused" in caplog.text


def test_counts_are_since_the_last_look() -> None:
    async def scenario() -> list[dict[str, float]]:
        it = bench(cap=2, seconds=forever, step=3)
        it.line.version = 1
        task = asyncio.create_task(it.during(5))
        await asyncio.sleep(1)
        seen = [it.dispatcher.take_counts()]
        it.line.step, it.line.version = 20, 19
        it.dispatcher.cancel_stale()
        seen += [it.dispatcher.take_counts(), it.dispatcher.take_counts()]
        await task
        return seen

    first, second, third = run_virtual(scenario())
    assert first["dispatcher/inflight/train"] == 2
    assert (first["dispatcher/off_policy/max"], first["dispatcher/off_policy/mean"]) == (1, 1)
    assert second["dispatcher/cancelled/train"] == second["dispatcher/cancelled/a"] == 2
    assert third["dispatcher/cancelled/a"] == 0 and "dispatcher/off_policy/max" not in third


def test_p11_the_cap_needs_no_engine_metrics() -> None:
    async def scenario() -> int:
        it = bench(cap=16, seconds=forever)
        await it.during(0.5)
        return len(it.env.calls)

    assert run_virtual(scenario()) == 16, "the whole cap is open at once, no probing from 1 upwards"
