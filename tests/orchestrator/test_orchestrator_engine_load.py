"""Reading an engine's `/metrics`."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from aiohttp import web

from prl.orchestrator import engine_load
from prl.orchestrator.engine_load import EngineLoad, LoadPoll, load_metrics, parse_load

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.75
vllm:num_preemptions_total{engine="0",model_name="m"} 4.0
vllm:prompt_tokens_total{engine="0",model_name="m"} 1000.0
vllm:generation_tokens_total{engine="0",model_name="m"} 2e+03
vllm:prefix_cache_queries_total{engine="0"} 100.0
vllm:prefix_cache_hits_total{engine="0"} 25.0
vllm:cache_config_info{block_size="16",cache_dtype="a,b\\"c",engine="0",num_gpu_blocks="1000"} 1.0
vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0
"""


def test_vllms_page_is_read() -> None:
    assert parse_load(VLLM) == EngineLoad(8, 2, 0.5, 32_000, 4, 1000, 2000, 100, 25)


def test_an_engine_may_say_nothing_of_its_memory() -> None:
    load = parse_load("vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n")
    assert load.capacity is None and load.running == 1 and load.usage == 0
    assert parse_load(VLLM.replace('num_gpu_blocks="1000"', 'num_gpu_blocks="None"')).capacity is None


def test_another_programs_page_is_refused() -> None:
    with pytest.raises(ValueError, match="num_requests_running"):
        parse_load("<html>welcome</html>\nprocess_cpu_seconds_total 3\n")


def test_rates_are_per_second_and_several_engines_are_told_apart() -> None:
    old = {"0": EngineLoad(prompt_tokens=100, generation_tokens=50), "1": EngineLoad()}
    new = {
        "0": EngineLoad(4, 1, 0.5, 1000, 2, 300, 150, 10, 5),
        "1": EngineLoad(6, 0, 0.7, 1000, 0, 40, 20, 0, 0),
    }
    values = load_metrics(old, new, 10.0)
    assert values["inference/0/generation_tokens_per_second"] == 10
    assert values["inference/agg/generation_tokens_per_second"] == 12
    assert values["inference/agg/prompt_tokens_per_second"] == 24
    assert values["inference/agg/requests_running"] == 10 and values["inference/1/requests_running"] == 6
    assert values["inference/agg/kv_cache_usage"] == 0.7 and values["inference/agg/preemptions"] == 2
    assert values["inference/agg/prefix_cache_hit_rate"] == 0.5
    one = load_metrics({}, {"0": new["0"]}, 10.0)
    assert {name.split("/")[1] for name in one} == {"agg"} and not [
        name for name in one if "per_second" in name
    ]


def test_a_restarted_engine_has_no_negative_rate() -> None:
    values = load_metrics({"0": EngineLoad(prompt_tokens=900)}, {"0": EngineLoad(prompt_tokens=10)}, 1.0)
    assert values["inference/agg/prompt_tokens_per_second"] == 0


def test_the_poll_tells_of_engines_that_answer_and_warns_once_of_those_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_load, "POLL_SECONDS", 0.01)
    told: list[list[EngineLoad]] = []
    logged: list[dict[str, float]] = []

    async def page(request: web.Request) -> web.Response:
        return web.Response(text=VLLM)

    async def scenario() -> None:
        app = web.Application()
        app.router.add_get("/metrics", page)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        root = f"http://127.0.0.1:{runner.addresses[0][1]}"
        task = asyncio.create_task(LoadPoll([root, "http://127.0.0.1:9"], told.append, logged.append).run())
        async with asyncio.timeout(30):
            while len(told) < 3:  # noqa: ASYNC110 - what is waited for is a list
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait({task})
        await runner.cleanup()

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert all([load.capacity for load in loads] == [32_000] for loads in told)
    assert logged[0]["inference/agg/requests_running"] == 8
    assert caplog.text.count("tells nothing") == 1 and "127.0.0.1:9" in caplog.text
