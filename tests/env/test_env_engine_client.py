"""The lean engine client: same answers and same errors as the SDK that it replaces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import openai
import pytest
from fake_engine import END, FakeEngine
from renderers.client import OverlongPromptError, generate
from verifiers.v1.clients import train
from verifiers.v1.clients.base import build_async_openai
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.errors import model_error

from prl.config.training import ModelConfig
from prl.env.engine_client import EngineClient, use_engine_client
from prl.env.renderers import load_renderer

CLIENTS = [EngineClient, build_async_openai]


def settings(base_url: str, **fields: Any) -> TrainClientConfig:
    return TrainClientConfig(base_url=base_url, api_key_var="ENGINE_TEST_KEY", **fields)


def using(client: Any, work: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        try:
            return await work(client)
        finally:
            await client.close()

    return asyncio.run(main())


def sample(client: Any, model: str = "tiny", prompt: str = "reverse ab") -> Any:
    renderer = load_renderer(ModelConfig(name="tiny"))
    messages = [{"role": "user", "content": prompt}]
    sampling = {"temperature": 1.0, "max_tokens": 16}
    return generate(
        client=client,
        renderer=renderer,
        messages=messages,
        model=model,
        sampling_params=sampling,
        cache_salt="v1",
        extra_headers={"X-Session-ID": "trace"},
    )


def test_it_takes_the_place_of_the_sdk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "build_async_openai", build_async_openai)
    use_engine_client()
    client = train.TrainClient(settings("http://127.0.0.1:9/v1"))
    assert isinstance(client.client, EngineClient)


def test_both_send_the_same_request_and_read_the_same_answer(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_TEST_KEY", "sesame")
    config = settings(engine.base_url, headers={"X-Extra": "1"})
    results = []
    for make in CLIENTS:
        engine.rng.seed(0)
        results.append(using(make(config), sample))
    ours, theirs = results
    for key in ("completion_ids", "completion_logprobs", "content", "finish_reason", "prompt_ids"):
        assert ours[key] == theirs[key]
    assert ours["content"] == "[ba]" and ours["completion_ids"][-1] == END
    first, second = ({k: v for k, v in r.items() if k != "headers"} for r in engine.requests)
    assert first == second
    for request in engine.requests:
        headers = {key.lower(): value for key, value in request["headers"].items()}
        assert headers["authorization"] == "Bearer sesame"
        assert headers["x-extra"] == "1" and headers["x-session-id"] == "trace"


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_failures_map_to_the_same_error(engine: FakeEngine, status: int) -> None:
    engine.answer = lambda prompt: status
    mapped = []
    for make in CLIENTS:
        with pytest.raises(openai.APIStatusError) as caught:
            using(make(settings(engine.base_url)), sample)
        mapped.append(model_error(caught.value))
    ours, theirs = mapped
    assert ours.status_code == theirs.status_code == status
    assert "scripted failure" in str(ours) and f"Error code: {status}" in str(ours)


def test_nobody_listening_is_a_connection_error() -> None:
    for make in CLIENTS:
        with pytest.raises(openai.APIConnectionError) as caught:
            using(make(settings("http://127.0.0.1:9/v1")), sample)
        assert model_error(caught.value).status_code == 503


def test_a_silent_engine_is_a_time_out(engine: FakeEngine) -> None:
    engine.latency = 5.0
    config = settings(engine.base_url, timeout={"read": 0.1})
    for make in CLIENTS:
        with pytest.raises(openai.APITimeoutError) as caught:
            using(make(config), sample)
        assert model_error(caught.value).status_code == 504


def test_the_context_limit_is_looked_up(engine: FakeEngine) -> None:
    async def work(client: EngineClient) -> None:
        models = await client.get("/models", cast_to=dict)
        assert models["data"][0]["max_model_len"] == 512
        with pytest.raises(OverlongPromptError):
            await sample(client, prompt="x" * 600)

    using(EngineClient(settings(engine.base_url)), work)
    assert engine.requests == []


def test_a_response_is_what_the_caller_reads(engine: FakeEngine) -> None:
    async def work(client: EngineClient) -> httpx.Response:
        url = engine.base_url.removesuffix("/v1") + "/inference/v1/generate"
        body = {"token_ids": [4, 90, 7, 5], "sampling_params": {}}
        engine.answer = lambda prompt: [91, END]
        return await client.post(url, cast_to=httpx.Response, body=body)

    response = using(EngineClient(settings(engine.base_url)), work)
    assert response.status_code == 200
    assert response.json()["choices"][0]["token_ids"] == [91, END]


def test_closing_an_unused_client_is_fine() -> None:
    asyncio.run(EngineClient(settings("http://127.0.0.1:9/v1")).close())
