"""`prl bench orchestrator`: what it counts, the scripted engine, and the arithmetic of its lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from aiohttp.test_utils import TestClient, TestServer

from prl.bench import orchestrator, orchestrator_driver
from prl.bench.scripted_engine import END, ScriptedEngine
from prl.config.load import load_resolved
from prl.run_dir import RunDir


def test_the_engine_gives_as_many_tokens_as_asked_and_rewards_that_differ() -> None:
    async def scenario() -> list[dict[str, Any]]:
        async with TestClient(TestServer(ScriptedEngine(0.0, 16).app())) as client:
            listed = await (await client.get("/v1/models")).json()
            assert listed["data"][0]["id"] == "tiny"
            posts = [await client.post("/inference/v1/generate", json={}) for _ in range(60)]
            return [await post.json() for post in posts]

    choices = [answer["choices"][0] for answer in asyncio.run(scenario())]
    assert {len(choice["token_ids"]) for choice in choices} == {16}
    assert all(choice["token_ids"][-1] == END for choice in choices)
    assert all(len(choice["logprobs"]["content"]) == 16 for choice in choices)
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3


def test_the_meter_measures_from_the_steady_state_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([10.0, 14.0])
    cpu = iter([1.0, 2.5])
    read = SimpleNamespace(perf_counter=lambda: next(clock), process_time=lambda: next(cpu))
    monkeypatch.setattr(orchestrator_driver, "time", read)
    meter = orchestrator_driver.Meter(warm=3, total=8)
    ended = [meter.add() for _ in range(9)]
    assert ended == [False] * 7 + [True, True] and capsys.readouterr().out.split() == ["START", "STOP"]
    usage = meter.usage
    assert (usage.rollouts, usage.seconds, usage.cpu) == (5, 4.0, 1.5) and usage.bytes_at_end > 0


def test_prls_own_part_is_what_the_orchestrator_uses_beyond_the_bare_client(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    usage = {"lag_median": 0.001, "lag_p99": 0.06, "bytes_before": 0}
    measured = {
        "bare": ({**usage, "rollouts": 100, "seconds": 2.0, "cpu": 0.4, "bytes_at_end": 64 * 10_240}, 1.6),
        "prl": ({**usage, "rollouts": 200, "seconds": 5.0, "cpu": 1.2, "bytes_at_end": 64 * 30_720}, 3.0),
    }
    monkeypatch.setattr(orchestrator, "_measure", lambda place, mode, *rest: measured[mode])
    line = orchestrator._compare(tmp_path, "single", 64, 100, psutil.Process(), "tcp://x", "http://y")
    assert line.verifiers_cpu_ms == pytest.approx(20.0), "server 16 and client 4"
    assert line.own_cpu_ms == pytest.approx(2.0) and line.share == pytest.approx(0.1)
    assert line.server_cpu_ms == pytest.approx(15.0)
    assert (line.bare_per_second, line.prl_per_second) == (50.0, 40.0)
    assert (line.bare_kb_per_rollout, line.kb_per_rollout) == (10.0, 30.0)
    row = orchestrator._row(line)
    assert "10.0%" in row and "lag above 50 ms" in row and "floor" not in row


@pytest.mark.parametrize("turns", list(orchestrator.ENVS))
def test_its_run_never_waits_for_anything_but_rollouts(turns: str, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "x")
    orchestrator.write_config(run, turns, 256)
    command, config = load_resolved(run.resolved_config)
    assert command == "rl" and config.rollout.max_inflight == 256 and config.max_steps is None
    assert config.rollout.batch_size % config.rollout.group_size == 0 and len(config.env) == 1


def test_the_trainer_that_takes_no_time_publishes_each_batch(tmp_path: Path) -> None:
    trainer = orchestrator_driver.NoTrainer(tmp_path)
    asyncio.run(trainer.put(3, [b""]))
    assert json.loads((tmp_path / "step_3" / "COMPLETE.json").read_text())["fingerprint"] == "v3"
    answer = asyncio.run(orchestrator_driver.NoEngine().update_weights("x", 3))
    assert answer["fingerprint"] == "v3"
