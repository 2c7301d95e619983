"""The whole orchestrator on a virtual clock: asynchrony, bounds, faults, the end, and resuming."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from typing import Any

import pytest
from orchestrator_fakes import FakeEngine, FakeEnv, Scenario, now, run_virtual

from prl.orchestrator.state import restore, snapshot


def run(*envs: FakeEnv, **kwargs: Any) -> Scenario:
    async def scenario() -> Scenario:
        it = Scenario(*envs, **kwargs)
        await it.run()
        return it

    return run_virtual(scenario())


def jitter(seed: int, low: float, high: float) -> Any:
    rng = random.Random(seed)
    return lambda number: rng.uniform(low, high)


@pytest.mark.parametrize("bound", [0, 1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_t7_no_shipped_trace_is_older_than_the_bound(bound: int, seed: int) -> None:
    slow, quick = (
        FakeEnv("a", seconds=jitter(seed, 0.1, 9.0)),
        FakeEnv("b", seconds=jitter(seed + 50, 0.1, 1.5)),
    )
    it = run(
        slow, quick, bound=bound, max_steps=16, batch_size=8, cap=16, engine=FakeEngine(seconds=0.6),
        trainer_seconds=jitter(seed + 100, 0.2, 4.0),
    )  # fmt: skip
    ages = it.recorder.series("off_policy/max")
    assert len(ages) == 16 and max(ages) <= bound
    if bound:
        assert max(ages) == bound, "the delays must be long enough to make the bound bind"
    starts = {e.id: e.policy.start for e in it.recorder.episodes}
    for step, names in it.recorder.annotated.items():
        assert len(names) == 8
        assert all(starts[name.rsplit("-", 1)[0]] >= step - 1 - bound for name in names)


@pytest.mark.parametrize("cap", [4, 24])
def test_t8_a_stalled_trainer_holds_the_lead_at_two_batches(cap: int) -> None:
    async def scenario() -> None:
        env = FakeEnv(seconds=lambda n: 1.0)
        it = Scenario(env, max_steps=9, cap=cap, trainer_seconds=lambda step: 500.0 if step == 4 else 1.0)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(300)
        assert it.trainer.newest.version == it.line.version == 3
        assert max(it.trainer.shipped) == 5, "stalled at v3: batch 5 = v + 2 is the last one shipped"
        assert it.dispatcher.inflight == 0, "nothing is sampled ahead of that"
        await task
        assert it.trainer.shipped_at[6] == pytest.approx(it.trainer.shipped_at[5] + 500, abs=5)
        assert max(it.trainer.shipped) == 9

    run_virtual(scenario())


def test_sampling_of_the_next_batch_runs_while_the_trainer_works() -> None:
    it = run(FakeEnv(seconds=lambda n: 2.0), max_steps=8, trainer_seconds=lambda step: 2.0)
    steps = it.recorder.series("time/step")
    assert max(steps[2:]) < 3.0, "one after the other would take 4 seconds a step"
    assert set(it.recorder.series("off_policy/max")[2:]) == {1.0}


def test_stragglers_hold_nothing_up_and_are_cancelled_once_a_batch_makes_them_stale() -> None:
    async def scenario() -> None:
        env = FakeEnv(seconds=lambda n: 1.0 if n not in (4, 5) else 1e6)
        it = Scenario(env, max_steps=4, bound=1, cap=6, trainer_seconds=lambda step: 40.0)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(1.5)
        assert it.line.step == 2 and it.env_cancelled == 0, "version 0 may still be used by batch 2"
        await asyncio.sleep(30)  # batch 2 is shipped long before v1, which comes at 41 s
        assert it.line.step == 3 and it.line.version == 0
        assert it.env_cancelled >= 2, "version 0 is too old for batch 3, so the slots are freed at once"
        await task

    run_virtual(scenario())


@pytest.mark.parametrize("max_steps", [1, 2, 6])
def test_t9_the_run_ends_when_the_last_version_is_proven(max_steps: int) -> None:
    it = run(max_steps=max_steps)
    assert sorted(it.trainer.shipped) == list(range(1, max_steps + 1))
    assert it.line.version == max_steps and it.statuses == [0]
    assert it.recorder.series("sync/fingerprint_ok") == [1.0] * it.watcher.updates
    assert it.engine.calls[-1][0] == "resume"


def test_t9_a_run_resumed_past_its_end_is_over_at_once() -> None:
    it = run(max_steps=3, first_step=4)
    assert it.trainer.shipped == {} and it.calls == [] and it.statuses == [0]


def test_t11_groups_of_one_give_no_batch_but_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(constant: bool) -> Scenario:
        it = Scenario(group_size=1, constant=constant, max_steps=2)
        task = asyncio.create_task(it.run())
        await asyncio.sleep(20)
        assert not task.done(), "no crash"
        task.cancel()
        await asyncio.wait({task})
        return it

    for constant, words in ((True, "gave nothing to train on"), (False, "none of 4 rollouts carries credit")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            it = run_virtual(scenario(constant))
        assert it.trainer.shipped == {} and it.line.step == 1 and len(it.calls) > 20
        assert words in caplog.text


def test_without_constant_batches_the_batch_shrinks() -> None:
    env = FakeEnv(outcome=lambda n: [1.0, 1.0, 0.0, 1.0][n % 4])
    it = run(env, constant=False, max_steps=3)
    assert [len(it.trainer.shipped[step][0]) for step in (1, 2, 3)] == [2, 2, 2]
    it = run(FakeEnv(outcome=env.outcome), constant=True, max_steps=3)
    assert [len(it.trainer.shipped[step][0]) for step in (1, 2, 3)] == [4, 4, 4]


def test_p1_a_held_batch_neither_stops_draining_nor_the_next_weights() -> None:
    async def scenario() -> None:
        it = Scenario(
            FakeEnv(seconds=lambda n: 1.0 if n < 8 else 30.0), max_steps=4, bound=1, cap=8,
            trainer_seconds=lambda step: 100.0,
        )  # fmt: skip
        task = asyncio.create_task(it.run())
        await asyncio.sleep(60)  # batch 3 cannot ship before v1, which comes at about 101 s
        assert max(it.trainer.shipped) == 2 and it.line.step == 3
        assert it.inbox.empty(), "what finished during the hold was taken in"
        assert len(it.recorder.episodes) >= 8
        await asyncio.sleep(60)
        assert it.line.version == 1, "the pending version cancelled what was stale and was applied"
        await task

    run_virtual(scenario())


def test_p2_a_part_that_dies_during_a_hold_ends_the_run() -> None:
    async def scenario() -> float:
        engine = FakeEngine()
        it = Scenario(engine=engine, max_steps=5, trainer_seconds=lambda step: 50.0)
        engine.fail["update"] = ConnectionError("engine is gone")
        with pytest.raises(ConnectionError, match="engine is gone"):
            await it.run()
        assert it.statuses == [1]
        return now()

    assert run_virtual(scenario()) < 60


@pytest.mark.parametrize("part", ["dispatcher", "sink", "watcher", "trainer", "recorder"])
@pytest.mark.parametrize("how", ["raises", "returns"])
def test_b10_a_dead_background_task_ends_the_run_with_the_reason(
    part: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        it = Scenario(max_steps=50)

        async def dies(*_: Any) -> None:
            await asyncio.sleep(3)
            if how == "raises":
                raise LookupError("broken part")

        setattr(getattr(it, part), "serve" if part == "trainer" else "run", dies)
        with pytest.raises((LookupError, RuntimeError), match=r"broken part|ended while the run goes on"):
            await it.run()
        assert it.statuses[0] == 1

    with caplog.at_level(logging.ERROR):
        run_virtual(scenario())
    assert "broken part" in caplog.text or "ended while the run goes on" in caplog.text


def test_a_dead_environment_server_ends_the_run() -> None:
    class Died(RuntimeError):
        pass

    with pytest.raises(Died, match="gone"):
        run(FakeEnv(outcome=lambda n: Died("env/a is gone") if n == 9 else float(n % 2)), fatal=(Died,))


def test_an_unproven_version_ends_the_run() -> None:
    engine = FakeEngine()
    engine.fingerprint = lambda version: "wrong" if version == 2 else f"print-{version}"
    with pytest.raises(RuntimeError, match="fingerprint wrong"):
        run(engine=engine, max_steps=9)


def test_silence_ends_the_run() -> None:
    async def scenario() -> float:
        it = Scenario(trainer_seconds=lambda step: 1e8, max_steps=9, patience=400.0)
        with pytest.raises(TimeoutError, match="nothing happened for 400 s"):
            await it.run()
        return now()

    assert run_virtual(scenario()) < 500


def test_faulty_rollouts_are_left_out_and_the_run_goes_on() -> None:
    def outcome(number: int) -> float | Exception:
        return [ConnectionError("500"), math.nan, 0.0, 1.0, 0.25, KeyError("x")][number % 6]  # type: ignore[return-value]

    it = run(FakeEnv(outcome=outcome), group_size=6, batch_size=6, cap=6, max_steps=4)
    values = it.recorder.of_step(2)
    assert values["train/a/all/has_error/mean"] == 0.5
    errors = {
        name.rsplit("/", 1)[1]: value for name, value in values.items() if "/error/" in name and "agg" in name
    }
    assert set(errors) == {"ConnectionError", "NonFiniteReward", "KeyError"}
    rewards = [e.traces[0].reward for e in it.recorder.episodes if e.trainable_traces]
    assert all(math.isfinite(r) for r in rewards)
    assert all(len(samples[0]) == 6 for samples in it.trainer.shipped.values())


def test_a_hanging_rollout_delays_its_group_only() -> None:
    env = FakeEnv(seconds=lambda n: 1e9 if n == 0 else 1.0)
    it = run(env, max_steps=6, cap=6, sources={"a": {"timeout": 50.0}}, trainer_seconds=lambda step: 20.0)
    assert it.trainer.shipped_at[3] < 60 and it.line.version == 6
    assert it.recorder.series("train/a/all/agent/error/TimeoutError") == [1.0]


def test_two_environments_share_the_batches() -> None:
    it = run(FakeEnv("a"), FakeEnv("b"), max_steps=6, batch_size=8)
    shares = it.recorder.of_step(6)
    assert sum(value for name, value in shares.items() if name.startswith("batch/")) == 1
    envs = {e.env for e in it.recorder.episodes}
    assert envs == {"a", "b"}


def test_engine_resumes_and_nothing_starts_during_an_update() -> None:
    it = run(FakeEnv(seconds=jitter(3, 0.2, 2.0)), engine=FakeEngine(seconds=1.5), max_steps=8)
    pauses = [at for route, at in it.engine.calls if route == "pause"]
    resumes = [at for route, at in it.engine.calls if route == "resume"]
    for pause, resume in zip(pauses, resumes, strict=True):
        assert not [call for call in it.calls if pause < call.at < resume + 0.49]


def test_p3_salts_follow_the_version_of_each_start() -> None:
    it = run(FakeEnv(seconds=jitter(5, 0.2, 3.0)), max_steps=10, group_size=4, batch_size=4, cap=6)
    assert all(call.cache_salt == f"v{call.version}" for call in it.calls)
    groups: dict[str, set[int]] = {}
    for call in it.calls:
        groups.setdefault(call.group_id, set()).add(call.version)
    assert any(len(versions) > 1 for versions in groups.values()), "some group must straddle an update"


def test_p10_waiting_for_the_policy_is_counted_once() -> None:
    it = run(FakeEnv(seconds=lambda n: 0.5), max_steps=8, trainer_seconds=lambda step: 10.0)
    steps = [it.recorder.of_step(step) for step in range(4, 9)]
    assert all(0 < step["time/wait_for_policy"] <= step["time/step"] for step in steps)
    passed = it.trainer.shipped_at[8] - it.trainer.shipped_at[3]
    assert sum(step["time/step"] for step in steps) == pytest.approx(passed)
    assert 0.8 * passed < sum(step["time/wait_for_policy"] for step in steps) <= passed


def test_metrics_of_the_time_axis() -> None:
    it = run(max_steps=12, trainer_seconds=lambda step: 3.0)
    ticks = [row for step, row in it.recorder.rows if step is None]
    assert len(ticks) >= 3, "every ten seconds, and at the end"
    for name in ("dispatcher/inflight/train", "watcher/policy_version", "event_loop_lag/p99"):
        assert name in ticks[-1]
    assert ticks[-1]["watcher/policy_version"] == 12
    assert it.totals.rollouts == sum(it.recorder.series("progress/rollouts"))


def draw_order(it: Scenario) -> list[str]:
    """Task keys of the groups, in the order in which they were opened."""
    seen: dict[str, str] = {}
    for call in it.calls:
        seen.setdefault(call.group_id, call.task_key)
    return [seen[group] for group in sorted(seen, key=lambda name: int(name.split("-")[1]))]


def test_the_order_of_draws_does_not_depend_on_timing() -> None:
    orders = []
    for seed in range(3):
        envs = FakeEnv("a", seconds=jitter(seed, 0.1, 5.0)), FakeEnv("b", seconds=jitter(seed + 9, 0.1, 2.0))
        orders.append(draw_order(run(*envs, max_steps=10, seed=7, trainer_seconds=jitter(seed, 0.1, 3.0))))
    shortest = min(map(len, orders))
    assert shortest >= 20 and len({tuple(order[:shortest]) for order in orders}) == 1


@pytest.mark.parametrize("cut", [1, 3, 5])
def test_p16_after_a_resume_each_task_is_drawn_as_in_an_uninterrupted_run(cut: int) -> None:
    reference = draw_order(run(FakeEnv("a"), FakeEnv("b"), max_steps=14, seed=3))
    states: dict[int, str] = {}

    async def first_part() -> Scenario:
        envs = FakeEnv("a", seconds=jitter(cut, 0.2, 6.0)), FakeEnv("b", seconds=jitter(cut + 1, 0.2, 6.0))
        it = Scenario(*envs, max_steps=99, seed=3, bound=2)

        async def save(step: int) -> None:
            states[step] = json.dumps(snapshot(step, it.totals, it.mixer, it.algorithms, it.parts.evals))

        object.__setattr__(it.parts, "save", save)
        task = asyncio.create_task(it.run())
        await it.line.until(lambda: cut in states, 100, "the checkpoint")
        await asyncio.sleep(2.5)  # killed with rollouts in flight, beyond the checkpoint
        task.cancel()
        await asyncio.wait({task})
        return it

    first = run_virtual(first_part())
    state = json.loads(states[cut])
    owed = [draw["index"] for draw in state["tasks"]["pending"]]
    drawn = state["tasks"]["count"]

    async def second_part() -> Scenario:
        it = Scenario(FakeEnv("a"), FakeEnv("b"), max_steps=cut + 6, first_step=cut + 1, seed=999)
        it.totals = restore(state, it.mixer, it.algorithms, it.parts.evals)
        await it.run()
        return it

    second = run_virtual(second_part())
    opened = []
    for call in second.calls:
        if call.group_id not in opened:
            opened.append(call.group_id)
    indices = [int(name.split("-")[1]) for name in opened]
    expected = [*owed, *range(drawn, drawn + len(indices) - len(owed))]
    assert indices == expected, "what is owed first, then the sequence goes on without a gap"
    keys = {int(call.group_id.split("-")[1]): call.task_key for call in second.calls}
    assert all(keys[i] == reference[i] for i in keys if i < len(reference))
    before = {int(call.group_id.split("-")[1]) for call in first.calls}
    assert set(range(max(indices) + 1)) <= set(indices) | (before - set(owed)), "no task is skipped"


def test_checkpoints_are_written_before_their_batch_is_shipped() -> None:
    order: list[tuple[str, int]] = []

    async def scenario() -> None:
        it = Scenario(max_steps=3)
        put = it.trainer.put

        async def save(step: int) -> None:
            order.append(("save", step))

        async def spy(step: int, messages: Any) -> None:
            order.append(("put", step))
            await put(step, messages)

        object.__setattr__(it.parts, "save", save)
        it.trainer.put = spy  # type: ignore[method-assign]
        await it.run()

    run_virtual(scenario())
    assert order == [(what, step) for step in (1, 2, 3) for what in ("save", "put")]


def test_a_checkpoint_that_cannot_be_written_ends_the_run() -> None:
    async def full(step: int) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run(save=full)


def test_p14_cut_samples_are_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> Scenario:
        it = Scenario(max_steps=2)
        build = it.sink._build
        it.sink._build = lambda env, trace: build(env, trace)._replace(truncated=1)
        await it.run()
        return it

    with caplog.at_level(logging.WARNING):
        it = run_virtual(scenario())
    assert it.recorder.of_step(1)["progress/truncated_samples"] == 4
    assert "4 samples were cut" in caplog.text


def test_the_step_line_tells_how_it_goes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="prl"):
        run(max_steps=2)
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step 2 |")]
    assert "4 rollouts" in line and "reward 0.5" in line and "off-policy 1" in line
