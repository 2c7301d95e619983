from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from monitor_lab import append, observed, write_run

from prl.checkpoint.marker import mark_complete
from prl.monitor import running
from prl.monitor.observed import observe

LONG_AGO = 1_000_000.0


def test_a_starving_trainer(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, training=lambda step: {"time/wait_for_batch": 1.5})
    found = running.starving_trainer(run)
    assert found and "75% of the newest 10 steps" in found.evidence and found.severity == "notice"
    assert found.knob.startswith("rollout.max_inflight=256 (it is 128)")
    assert running.starving_trainer(observed(tmp_path / "b")) is None


def test_rollouts_that_wait(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, lambda step: {"time/wait_for_policy": 1.2})
    found = running.waiting_rollouts(run)
    assert found and "60%" in found.evidence and found.knob == "cluster.train_ranks=2 (it is 1)"
    assert running.waiting_rollouts(observed(tmp_path / "b")) is None


def test_reward_errors_are_told_apart_from_others(tmp_path: Path) -> None:
    errors = {"train/agg/all/agent/error/RewardError": 3.0, "train/agg/all/agent/error/RolloutTimeout": 2.0}
    run = observed(tmp_path, 20, lambda step: errors)
    found = running.reward_errors(run)
    assert found and found.evidence.endswith("RewardError 30") and "env" in found.knob
    assert running.reward_errors(observed(tmp_path / "b")) is None


@pytest.mark.parametrize(
    ("kind", "knob"),
    [
        ("RolloutTimeout", "env.<name>.timeout"),
        ("PromptTooLong", "inference.max_model_len=1024 (it is 512)"),
        ("EmptyCompletion", "traces/stream.jsonl"),
    ],
)
def test_failing_rollouts(tmp_path: Path, kind: str, knob: str) -> None:
    values = {"train/agg/all/has_error/mean": 0.25, f"train/agg/all/agent/error/{kind}": 32.0}
    run = observed(tmp_path, 12, lambda step: values)
    found = running.failing_rollouts(run)
    assert found and found.evidence == f"25% of the newest rollouts failed: {kind} 320" and knob in found.knob
    assert running.failing_rollouts(observed(tmp_path / "b")) is None


def test_stale_rollouts(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, lambda step: {"off_policy/dropped": 64.0})
    found = running.thrown_away(run)
    assert found and found.evidence.startswith("50%")
    assert found.knob == "rollout.max_off_policy_steps=16 (it is 8)"
    assert running.thrown_away(observed(tmp_path / "b")) is None


def test_slow_checkpoints(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, training=lambda step: {"time/save_ckpt": 1.0} if step % 2 == 0 else {})
    found = running.slow_checkpoints(run)
    assert found and "25%" in found.evidence and found.knob == "ckpt.interval=20 (it is 5)"
    assert running.slow_checkpoints(observed(tmp_path / "b")) is None


def test_a_busy_event_loop(tmp_path: Path) -> None:
    write_run(tmp_path)
    append(tmp_path, "orchestrator", {"step": None, "time": time.time(), "event_loop_lag/p99": 0.9})
    found = running.busy_loop(observe(tmp_path))
    assert found and "0.9 s late" in found.evidence and "max_inflight=64" in found.knob
    append(tmp_path, "orchestrator", {"step": None, "time": time.time(), "event_loop_lag/p99": 0.01})
    assert running.busy_loop(observe(tmp_path)) is None, "the newest value counts"


@pytest.mark.parametrize(
    ("name", "told"),
    [("system_memory_usage_percentage", "memory is full"), ("disk_usage_percentage", "disk is full")],
)
def test_a_full_machine(tmp_path: Path, name: str, told: str) -> None:
    write_run(tmp_path)
    assert running.full_machine(observe(tmp_path)) is None
    append(tmp_path, "system", {"step": None, "time": time.time(), f"system/{name}": 99.0})
    found = running.full_machine(observe(tmp_path))
    assert found and found.name == told


def test_how_it_ended(tmp_path: Path) -> None:
    assert running.ended_badly(observed(tmp_path / "a")) is None
    assert running.ended_badly(observed(tmp_path / "b", status="FINISHED")) is None
    killed = running.ended_badly(observed(tmp_path / "c", status="KILLED"))
    failed = running.ended_badly(observed(tmp_path / "d", status="FAILED"))
    assert killed and killed.severity == "notice" and failed and failed.severity == "down"


def test_the_way_on_is_one_that_works(tmp_path: Path) -> None:
    run = observed(tmp_path / "c", status="KILLED")
    assert running.going_on(run).startswith(
        "run.name=c run.clean=true ckpt=interval"
    )  # nothing to resume from
    for part in ("trainer", "orchestrator"):
        directory = tmp_path / "c" / "checkpoints" / "step_6" / part
        directory.mkdir(parents=True)
        (directory / "state").write_text("x")
    assert "clean=true" in running.going_on(run)  # half written
    mark_complete(tmp_path / "c" / "checkpoints" / "step_6")
    assert running.going_on(run) == "run.name=c run.resume=latest, which goes on from step 6"
    evaluation = observed(tmp_path / "e", status="KILLED", config={"command": "eval"})
    assert "run.name=e run.resume=latest" in running.going_on(evaluation)
    elsewhere = observed(tmp_path / "f", config={"ckpt": {"dir": str(tmp_path / "c" / "checkpoints")}})
    assert "goes on from step 6" in running.going_on(elsewhere)


def test_a_run_that_says_nothing_any_more(tmp_path: Path) -> None:
    run = observed(tmp_path, now=LONG_AGO)
    assert running.gone_silent(run, LONG_AGO + 200) is None
    found = running.gone_silent(run, LONG_AGO + 1200)
    assert found and found.severity == "down" and "20 min" in found.evidence
    ended = observed(tmp_path / "b", now=LONG_AGO, status="FINISHED")
    assert running.gone_silent(ended, LONG_AGO + 1200) is None


def test_a_slow_run_is_not_silent_within_ten_of_its_steps(tmp_path: Path) -> None:
    run = observed(tmp_path, now=LONG_AGO, training=lambda step: {"time/step": 1000.0})
    assert running.gone_silent(run, LONG_AGO + 5000) is None
    assert running.gone_silent(run, LONG_AGO + 15000) is not None


def test_a_log_that_grows_is_a_sign_of_life(tmp_path: Path) -> None:
    run = observed(tmp_path, now=LONG_AGO)
    log = tmp_path / "logs" / "attempt_1" / "trainer.log"
    log.write_text("compiling\n")
    os.utime(log, (LONG_AGO + 1100, LONG_AGO + 1100))
    assert running.gone_silent(run, LONG_AGO + 1200) is None
