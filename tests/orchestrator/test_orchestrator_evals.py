"""Evaluations while training: when, in which order, of one version, and what survives a resume."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
from orchestrator_fakes import FakeEngine, FakeEnv, Scenario, eval_source, make_episode, now, run_virtual

from prl.orchestrator.eval_epoch import EvalJob, Evals, EvalSource
from prl.orchestrator.eval_run import roll, run_epochs
from prl.records import Episode, PolicySpan

Rows = list[tuple[dict[str, float], int]]


def evals_of(*sources: EvalSource, last: int | None = None, pinned: bool = True) -> tuple[Evals, Rows]:
    rows: Rows = []
    found = Evals(sources, last=last, pinned=pinned, report=lambda values, step: rows.append((values, step)))
    return found, rows


def answer(job: EvalJob, reward: float | None, version: int = 0, **kwargs: Any) -> Episode:
    episode = make_episode(f"x{job.task}", reward, env=job.env, **kwargs)
    episode.policy = PolicySpan(version, version)
    return episode


def drain(evals: Evals, version: int = 0, reward: Callable[[EvalJob], float] = lambda job: 1.0) -> int:
    count = 0
    while (job := evals.take()) is not None:
        evals.finish(job, answer(job, reward(job), version))
        count += 1
    return count


def x(tasks: int = 3, group_size: int = 2, interval: int = 2, name: str = "x") -> EvalSource:
    return eval_source(FakeEnv(name), tasks, group_size, interval)


def due_steps(evals: Evals, versions: range) -> list[int]:
    found = []
    for version in versions:
        evals.trigger(version)
        if not evals.idle:
            found.append(version)
            drain(evals, version)
    return found


def test_all_are_due_at_the_start_on_their_interval_and_at_the_last_version() -> None:
    evals, rows = evals_of(x(interval=3), x(interval=4, name="y"), last=10)
    evals.start(0, fresh=True)
    assert drain(evals) == 12, "all at the start"
    assert due_steps(evals, range(1, 11)) == [3, 4, 6, 8, 9, 10]
    steps = {env: [step for values, step in rows if f"eval/{env}/policy_version" in values] for env in "xy"}
    assert steps == {"x": [0, 3, 6, 9, 10], "y": [0, 4, 8, 10]}
    assert [version for version in range(11) if evals.is_due(version)] == [0, 3, 4, 6, 8, 9, 10]


def test_the_first_may_be_skipped() -> None:
    evals, rows = evals_of(x(), last=4)
    evals.start(0, fresh=True, skip_first=True)
    assert evals.idle and due_steps(evals, range(1, 5)) == [2, 4] and len(rows) == 2


def test_an_interval_crossed_between_two_applied_versions_is_not_lost() -> None:
    evals, rows = evals_of(x(interval=4))
    evals.start(0, fresh=False)
    for version in (3, 5, 7, 9):
        evals.trigger(version)
        drain(evals, version)
    assert [step for _, step in rows] == [5, 9]


def test_environments_take_turns_and_members_of_a_task_follow_each_other() -> None:
    evals, _ = evals_of(x(2, 2), x(1, 2, name="y"))
    evals.start(0, fresh=True)
    jobs = [evals.take() for _ in range(6)]
    order = [(job.env, job.task, job.rollout) for job in jobs if job]
    assert order == [("x", 0, 0), ("y", 0, 0), ("x", 0, 1), ("y", 0, 1), ("x", 1, 0), ("x", 1, 1)]
    assert evals.take() is None and evals.waiting == 0 and not evals.idle


def test_scores_by_hand() -> None:
    """4 tasks of 4 rollouts with 0, 1, 2 and 4 right ones: pass@2 = (0 + 1/2 + 5/6 + 1) / 4."""
    right = [0, 1, 2, 4]
    evals, rows = evals_of(x(4, 4))
    evals.start(0, fresh=True)
    drain(evals, 7, lambda job: float(job.rollout < right[job.task]))
    ((values, step),) = rows
    prefix = "eval/x/effective/agent/"
    assert step == 0 and values["eval/x/policy_version"] == 7 and values["eval/x/coverage"] == 1
    assert values[prefix + "avg@4"] == values["eval/x/all/agent/avg@4"] == pytest.approx(7 / 16)
    assert values[prefix + "pass@1"] == pytest.approx(7 / 16)
    assert values[prefix + "pass@2"] == pytest.approx((0 + 0.5 + 5 / 6 + 1) / 4)
    assert values[prefix + "pass@4"] == pytest.approx(0.75)
    assert values[prefix + "pass^2"] == pytest.approx((0 + 0 + 1 / 6 + 1) / 4)
    assert values[prefix + "pass^4"] == pytest.approx(0.25)
    assert values["eval/x/all/agent/solved_none"] == 0.25 and values["eval/x/all/agent/solved_all"] == 0.25
    assert values["eval/x/effective/agent/reward/mean"] == pytest.approx(7 / 16)
    assert not [name for name in values if "is_trainable" in name or "is_admitted" in name or "/agg/" in name]
    assert "eval/x/all/agent/pass@1" not in values


def test_failures_count_in_all_only_and_rewards_between_give_no_pass_rates() -> None:
    evals, rows = evals_of(x(2, 1))
    evals.start(0, fresh=True)
    first, second = evals.take(), evals.take()
    assert first and second
    evals.finish(first, answer(first, None, error="ProviderError"))
    evals.finish(second, answer(second, 0.5))
    ((values, _),) = rows
    assert values["eval/x/all/agent/avg@1"] == 0.25 and values["eval/x/effective/agent/avg@1"] == 0.5
    assert values["eval/x/all/has_error/mean"] == 0.5 and values["eval/x/all/agent/error/ProviderError"] == 1
    assert values["eval/x/effective/num_turns/mean"] == 1
    assert not [name for name in values if "pass" in name]


def test_mixed_versions_are_reported_by_the_lowest_and_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    evals, rows = evals_of(x(1, 3), pinned=False)
    evals.start(4, fresh=True)
    with caplog.at_level(logging.WARNING):
        for version in (6, 4, 5):
            job = evals.take()
            assert job
            evals.finish(job, answer(job, 1.0, version))
    assert rows[0][0]["eval/x/policy_version"] == 4 and "mixes versions 4 to 6" in caplog.text


@pytest.mark.parametrize("pinned", [True, False])
def test_progress_survives_a_resume(pinned: bool) -> None:
    """What is left of a mixed epoch runs on; one that must be of one version starts anew, it is not lost."""
    evals, _ = evals_of(x(3, 2), x(2, 1, interval=50, name="y"), last=9, pinned=pinned)
    evals.start(0, fresh=True)
    drain(evals)
    evals.trigger(4)
    for _ in range(4):
        job = evals.take()
        assert job
        evals.finish(job, answer(job, float(job.rollout), 4))
    state = json.loads(json.dumps(evals.state_dict()))
    again, rows = evals_of(x(3, 2), x(2, 1, interval=50, name="y"), last=9, pinned=pinned)
    again.load_state_dict(state)
    again.start(5, fresh=False)
    assert drain(again, 5, lambda job: float(job.rollout)) == (6 if pinned else 2)
    ((values, step),) = rows
    assert step == 5 and values["eval/x/policy_version"] == (5 if pinned else 4)
    assert values["eval/x/effective/agent/avg@2"] == 0.5


def test_what_fell_due_while_no_checkpoint_knew_of_it_is_made_up_for() -> None:
    for resumed, owed in ((5, False), (6, False), (7, True), (8, True)):
        evals, _ = evals_of(x(interval=3))
        evals.load_state_dict({"seen": 4, "open": []})
        evals.start(resumed, fresh=False)
        assert evals.idle != owed, "v6 was due, and the checkpoint of v4 knows of no evaluation of it"


def test_on_resume_the_step_itself_is_evaluated_again_only_when_asked() -> None:
    for retrigger in (False, True):
        evals, _ = evals_of(x(interval=5))
        evals.load_state_dict({"seen": 9, "open": []})
        evals.start(10, fresh=False, retrigger=retrigger)
        assert evals.idle != retrigger


def test_state_of_an_environment_that_is_gone_is_dropped() -> None:
    evals, rows = evals_of(x())
    evals.load_state_dict({"seen": 1, "open": [{"env": "gone", "version": 1, "results": []}]})
    evals.start(1, fresh=False)
    assert evals.idle and rows == []


def test_what_is_given_up_is_reported_as_part(caplog: pytest.LogCaptureFixture) -> None:
    evals, rows = evals_of(x(2, 2))
    evals.start(0, fresh=True)
    job = evals.take()
    assert job
    late = evals.take()
    assert late
    evals.finish(job, answer(job, 1.0))
    evals.abandon()
    evals.finish(late, answer(late, 1.0))
    assert evals.idle and [values["eval/x/coverage"] for values, _ in rows] == [0.25]
    assert "given up after 1 of 4" in caplog.text


def test_without_a_trainer_around_all_that_is_due_runs_at_one_version() -> None:
    async def scenario() -> None:
        env = FakeEnv("x", seconds=lambda n: 1.0 + n % 3)
        evals, rows = evals_of(eval_source(env, 4, 2))
        evals.start(0, fresh=True)
        await run_epochs(evals, 0, inflight=3)
        assert evals.idle and len(env.calls) == 8 and rows[0][0]["eval/x/effective/agent/avg@2"] == 0.5
        assert {call.cache_salt for call in env.calls} == {"v0"}
        busy = [sum(c.at <= t < c.at + 1 for c in env.calls) for t in range(9)]
        assert max(busy) <= 3

    run_virtual(scenario())


def test_a_rollout_that_raises_hangs_or_answers_nothing_is_a_failure_of_its_own() -> None:
    def outcome(number: int) -> Any:
        return [RuntimeError("broken"), 1.0, Episode("e", "x", "g", "x2", {}, [])][number]

    async def scenario() -> list[str]:
        env = FakeEnv("x", seconds=lambda n: 1e6 if n == 1 else 1.0, outcome=outcome)
        evals, _ = evals_of(eval_source(env, 3, 1))
        evals.start(0, fresh=True)
        names = []
        while (job := evals.take()) is not None:
            episode = await roll(job, 2, lambda: 3)
            assert episode.policy == PolicySpan(2, 3)
            evals.finish(job, episode)
            names.append(episode.traces[0].error.type if episode.traces[0].error else "")
        assert evals.idle and now() < 400
        return names

    assert run_virtual(scenario()) == ["RuntimeError", "TimeoutError", "EmptyEpisode"]


def test_what_is_fatal_stays_fatal() -> None:
    async def scenario() -> None:
        evals, _ = evals_of(eval_source(FakeEnv("x", outcome=lambda n: ConnectionError("gone")), 1, 1))
        evals.start(0, fresh=True)
        with pytest.raises(ExceptionGroup):
            await run_epochs(evals, 0, 1, fatal=(ConnectionError,))

    run_virtual(scenario())


def scenario_with_evals(env: FakeEnv, **kwargs: Any) -> Scenario:
    async def whole() -> Scenario:
        source = eval_source(env, tasks=4, group_size=2, interval=2)
        it = Scenario(FakeEnv("a"), evals=[source], max_steps=5, cap=4, **kwargs)
        env.line = it.line
        await it.run()
        return it

    return run_virtual(whole())


def test_a_run_evaluates_at_the_start_on_interval_and_the_last_version_each_at_one_version() -> None:
    env = FakeEnv("x", seconds=lambda n: 3.0)
    it = scenario_with_evals(env)
    rows = [(step, row) for step, row in it.recorder.rows if "eval/x/policy_version" in row]
    assert [step for step, _ in rows] == [0, 2, 4, 5]
    assert all(row["eval/x/policy_version"] == step for step, row in rows)
    versions = [call.version for call in env.calls]
    assert versions == sorted(versions)
    assert {v: versions.count(v) for v in set(versions)} == dict.fromkeys((0, 2, 4, 5), 8)
    assert it.line.version == 5 and sorted(it.trainer.shipped) == [1, 2, 3, 4, 5] and it.statuses == [0]
    assert all(f"v{call.version}" == call.cache_salt for call in env.calls)
    assert not [call for call in it.calls if call.at < 3.0], "evaluation goes first and fills the cap"


def test_training_goes_on_around_an_evaluation_that_is_not_pinned() -> None:
    env = FakeEnv("x", seconds=lambda n: 7.0)
    it = scenario_with_evals(env, pinned=False, eval_cap=1)
    assert max(call.version for call in env.calls) == 5 and sorted(it.trainer.shipped) == [1, 2, 3, 4, 5]
    mixed = [row for _, row in it.recorder.rows if "eval/x/policy_version" in row]
    assert len(mixed) >= 3 and all(row["eval/x/coverage"] == 1 for row in mixed)


def test_training_starts_nothing_while_an_evaluation_waits_though_there_is_room() -> None:
    env = FakeEnv("x", seconds=lambda n: 2.0)
    it = scenario_with_evals(env, eval_cap=2)
    first_epoch = [call for call in env.calls if call.version == 0]
    trained = [call for call in it.calls if call not in env.calls]
    assert [round(call.at) for call in first_epoch] == [0, 0, 2, 2, 4, 4, 6, 6]
    assert round(min(call.at for call in trained)) == 6, (
        "the last of it has started, its end is not waited for"
    )


def test_no_evaluation_starts_while_the_engines_change_weights() -> None:
    env = FakeEnv("x", seconds=lambda n: 1.3)
    it = scenario_with_evals(env, pinned=False, eval_cap=1, engine=FakeEngine(seconds=1.5))
    pauses = [at for route, at in it.engine.calls if route == "pause"]
    resumes = [at for route, at in it.engine.calls if route == "resume"]
    for pause, resume in zip(pauses, resumes, strict=True):
        assert not [call for call in env.calls if pause < call.at < resume + 0.49]
    assert len(pauses) == 5 and len(env.calls) > 8


def test_the_dispatcher_tells_of_evaluations() -> None:
    async def whole() -> dict[str, float]:
        env = FakeEnv("x", seconds=lambda n: 5.0, outcome=lambda n: ConnectionError("refused"))
        it = Scenario(FakeEnv("a"), evals=[eval_source(env, 4, 2)], max_steps=2, cap=6)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(2)
        early = it.dispatcher.take_counts()
        assert early["dispatcher/mode"] == 1 and early["dispatcher/inflight/train"] == 0
        assert early["dispatcher/inflight/eval"] == 6 and early["dispatcher/queued/eval"] == 2
        await asyncio.sleep(6)
        late = it.dispatcher.take_counts()
        task.cancel()
        await asyncio.wait({task})
        return late

    late = run_virtual(whole())
    assert late["dispatcher/mode"] == 0 and late["dispatcher/errored/eval"] == 6
    assert late["dispatcher/errored/x"] == 6 and late["dispatcher/cancelled/eval"] == 0
