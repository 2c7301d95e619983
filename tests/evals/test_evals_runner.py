"""Rollouts: so many at once, repeated when that can help, each in the ledger exactly once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from evals_lab import ToyEnv, ToyTask, make_config, make_run

from prl.config.schema import EvalConfig
from prl.evals.ledger import Ledger, read_rows, read_stream
from prl.evals.progress import Count, Progress
from prl.evals.retries import Backoff, EndpointRefused, RateLimit, is_passing, is_refusal
from prl.evals.runner import Runner, Source
from prl.records import TraceError
from prl.run_dir import RunDir

BUSY = TraceError("ProviderError", "too many", 429)
BROKEN = TraceError("ProviderError", "oops", 500)
GRADER = TraceError("TaskError", "no such grade")


def run_all(
    run: RunDir,
    env: ToyEnv,
    tasks: int = 4,
    group_size: int = 2,
    steps: tuple[int, ...] = (0,),
    **fields: object,
) -> tuple[Runner, Progress]:
    config: EvalConfig = make_config(**fields)
    source = Source(env, [ToyTask(f"t{i}") for i in range(tasks)], group_size, {})
    progress = Progress({(step, "toy"): Count(tasks * group_size) for step in steps})

    async def work() -> Runner:
        ledger = Ledger(run)
        runner = Runner(config, {"toy": source}, "http://e/v1", ledger, progress)
        try:
            for step in steps:
                await runner.run(step)
        finally:
            ledger.close()
        return runner

    return asyncio.run(work()), progress


def ids(run: RunDir) -> list[str]:
    return [record["id"] for _, record in read_stream(run.traces / "stream.jsonl")]


def test_every_rollout_lands_once_and_is_counted(tmp_path: Path) -> None:
    run, env = make_run(tmp_path), ToyEnv(lambda task, _: float(task == "t1"))
    _, progress = run_all(run, env)
    rows = read_rows(run)
    assert len(rows) == len(ids(run)) == len(env.calls) == 8
    assert {(key.task, key.rollout) for key in rows} == {(f"t{i}", r) for i in range(4) for r in range(2)}
    count = progress.counts[0, "toy"]
    assert (count.done, count.running, count.errors, count.mean) == (8, 0, 0, 0.25)


@pytest.mark.parametrize("fault", [BUSY, BROKEN, TraceError("ProviderError", "gone", 503)])
def test_what_may_pass_is_tried_again(tmp_path: Path, fault: TraceError) -> None:
    run = make_run(tmp_path)
    env = ToyEnv(lambda task, calls: fault if task == "t0" and calls < 2 else 1.0)
    run_all(run, env, tasks=2, group_size=1)
    assert env.calls.count("t0") == 3 and all(row.ok for row in read_rows(run).values())
    (record,) = [r for _, r in read_stream(run.traces / "stream.jsonl") if r["task_key"] == "t0"]
    assert record["retries"] == 2, "the failed tries leave one number, no line"


def test_what_cannot_pass_is_not_tried_again(tmp_path: Path) -> None:
    run, env = make_run(tmp_path), ToyEnv(lambda task, _: GRADER if task == "t0" else 1.0)
    _, progress = run_all(run, env, tasks=2, group_size=1)
    assert env.calls.count("t0") == 1
    (failed,) = [row for row in read_rows(run).values() if not row.ok]
    assert failed.errors == ("TaskError",) and failed.agents == ()
    assert progress.counts[0, "toy"].errors == 1 and progress.counts[0, "toy"].mean == 1.0


def test_retries_end(tmp_path: Path) -> None:
    run, env = make_run(tmp_path), ToyEnv(lambda task, _: BROKEN if task == "t0" else 1.0)
    run_all(run, env, tasks=2, group_size=1, rules={"retries": 3})
    assert env.calls.count("t0") == 4
    assert [row.errors for row in read_rows(run).values() if not row.ok] == [("ProviderError",)]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_for_all_ends_the_evaluation_and_loses_nothing(tmp_path: Path, status: int) -> None:
    run = make_run(tmp_path)
    refusal = TraceError("ProviderError", "bad\nkey", status)
    env = ToyEnv(lambda task, _: refusal if task == "t3" else 1.0)
    with pytest.raises(EndpointRefused, match=rf"http://e/v1 refuses \({status}\): bad key"):
        run_all(run, env, group_size=1, concurrency=1)
    assert len(read_rows(run)) == 3


def test_a_dead_endpoint_ends_the_evaluation(tmp_path: Path) -> None:
    run, env = make_run(tmp_path), ToyEnv(lambda task, _: BROKEN if int(task[1:]) >= 5 else 1.0)
    with pytest.raises(EndpointRefused, match="last 10 rollouts failed after all retries: oops"):
        run_all(run, env, tasks=200, group_size=1, concurrency=4, rules={"retries": 0})
    rows = read_rows(run)
    assert sum(row.ok for row in rows.values()) == 5 and len(rows) < 20


def test_concurrency_is_what_was_asked_for(tmp_path: Path) -> None:
    env = ToyEnv(lambda *_: 1.0, latency=0.01)
    run_all(make_run(tmp_path), env, tasks=20, group_size=1, concurrency=3)
    assert env.most_running == 3


def test_a_second_attempt_does_only_what_is_missing(tmp_path: Path) -> None:
    first = ToyEnv(lambda task, _: GRADER if task == "t0" else 1.0)
    run_all(make_run(tmp_path), first)
    before = {key: row.id for key, row in read_rows(RunDir(tmp_path)).items() if row.ok}
    second = ToyEnv(lambda *_: 0.5)
    run_all(make_run(tmp_path, 2), second, tasks=5, group_size=3)
    rows = read_rows(RunDir(tmp_path))
    assert sorted(second.calls) == sorted(["t0"] * 3 + ["t1", "t2", "t3"] + ["t4"] * 3)
    assert len(rows) == 15 and all(row.ok for row in rows.values())
    assert {key: rows[key].id for key in before} == before
    assert len(ids(RunDir(tmp_path))) == len(set(ids(RunDir(tmp_path))))


def test_checkpoints_are_apart(tmp_path: Path) -> None:
    env = ToyEnv(lambda *_: 1.0)
    run_all(make_run(tmp_path), env, tasks=2, group_size=1, steps=(10, 20))
    assert {key.step for key in read_rows(RunDir(tmp_path))} == {10, 20} and len(env.calls) == 4
    assert env.salts == {"step_10", "step_20"}, "an engine must not answer from another checkpoint's cache"


def test_an_episode_without_traces_is_an_error(tmp_path: Path) -> None:
    class Empty(ToyEnv):
        async def run(self, task: ToyTask, **request: object):  # type: ignore[no-untyped-def]
            episode = await super().run(task, **request)
            episode.traces.clear()
            return episode

    run_all(make_run(tmp_path), Empty(lambda *_: 1.0), tasks=1, group_size=1)
    (row,) = read_rows(RunDir(tmp_path)).values()
    assert row.errors == ("EmptyEpisode",)


def test_rate_limit_spaces_the_starts() -> None:
    async def starts() -> list[float]:
        limit, begun = RateLimit(60 * 50), time.monotonic()
        times = []
        for _ in range(6):
            await limit.wait()
            times.append(time.monotonic() - begun)
        return times

    times = asyncio.run(starts())
    assert all(at >= 0.02 * index - 0.002 for index, at in enumerate(times)), "late is fine, early is not"
    assert times[-1] < 5


def test_no_rate_limit_does_not_wait() -> None:
    async def starts() -> float:
        limit, begun = RateLimit(None), time.monotonic()
        for _ in range(1000):
            await limit.wait()
        return time.monotonic() - begun

    assert asyncio.run(starts()) < 0.5


def test_backoff_doubles_up_to_its_limit() -> None:
    backoff = Backoff(make_config(rules={"backoff": 1.0, "max_backoff": 6.0}).eval, seed=0)
    for attempt, longest in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0), (9, 6.0)):
        pauses = [backoff.seconds(attempt) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


def test_statuses_are_told_apart() -> None:
    passing = [status for status in range(100, 600) if is_passing(TraceError("x", "", status))]
    assert passing == [408, 409, 425, 429, *range(500, 600)]
    assert not is_passing(TraceError("RolloutTimeout")) and not is_refusal(TraceError("RolloutTimeout"))
    assert [status for status in range(100, 600) if is_refusal(TraceError("x", "", status))] == [
        401,
        403,
        404,
    ]
