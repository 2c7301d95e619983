"""The HTTP contract, and how the clients in use see the engine: openai's and renderers'."""

import asyncio
from types import SimpleNamespace

import aiohttp
import engine_server
import inference_contract
import inference_models as lab
import openai
import pytest
from renderers import client as renderers_client

from prl.config.serving import SyncConfig
from prl.inference.client import EngineAdmin, LogprobScorer
from prl.sync.filesystem import FilesystemPublisher


@pytest.fixture(scope="module")
def engine(tiny_dir):
    with engine_server.serving(tiny_dir) as running:
        yield running


@pytest.mark.parametrize("check", inference_contract.CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, engine):
    async def run():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
            await check(session, engine)

    asyncio.run(run())
    assert engine.sampler.slots.active == 0


class Renderer:
    """Only what the client asks for when the prompt is given as ids."""

    supports_tools = True

    def get_stop_token_ids(self):
        return [lab.EOS]

    def parse_response(self, completion_ids, *, prompt_ids, tools):
        return SimpleNamespace(content="", reasoning_content=None, reasoning_complete=None, tool_calls=[])


def test_the_training_client_accepts_our_answers(engine):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key="none") as client:
            return await renderers_client.generate(
                client=client,
                renderer=Renderer(),
                messages=[],
                model="tiny",
                prompt_ids=[4, 20, 30],
                sampling_params={"temperature": 0.7, "top_p": 0.9, "max_tokens": 9, "seed": 1},
                cache_salt="v0",
            )

    answer = asyncio.run(run())
    assert len(answer["completion_ids"]) == len(answer["completion_logprobs"]) > 0
    assert answer["finish_reason"] in ("stop", "length")


def test_openai_client_streams_and_stops_at_a_string(engine):
    async def run():
        async with openai.AsyncOpenAI(base_url=f"{engine.base_url}/v1", api_key="none") as client:
            ask = {
                "model": "tiny",
                "messages": [{"role": "user", "content": "hi"}],
                "seed": 4,
                "max_tokens": 30,
            }
            free = await client.chat.completions.create(**ask, logprobs=True)
            text = free.choices[0].message.content
            stop = text[5:7]
            stopped = await client.chat.completions.create(**ask, stop=stop)
            pieces = await client.chat.completions.create(**ask, stop=[stop], stream=True)
            streamed = "".join([piece.choices[0].delta.content or "" async for piece in pieces])
            return free, text[: text.index(stop)], stopped, streamed

    free, expected, stopped, streamed = asyncio.run(run())
    assert stopped.choices[0].message.content == expected == streamed
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.usage.completion_tokens < free.usage.completion_tokens
    entries = free.choices[0].logprobs.content
    assert len(entries) == free.usage.completion_tokens
    assert all(entry.logprob <= 0 for entry in entries)


def test_unsupported_wishes_are_refused_by_name(engine):
    async def ask(**wish):
        async with aiohttp.ClientSession() as session:
            body = inference_contract.chat(engine, **wish)
            return await inference_contract.post(session, f"{engine.base_url}/v1/chat/completions", body)

    for wish in ({"top_logprobs": 3}, {"presence_penalty": 1.0}, {"stop": 5}, {"stop": [""]}):
        status, answer = asyncio.run(ask(**wish))
        assert status == 400
        assert next(iter(wish)) in answer["error"]["message"]


def test_update_over_http_proves_itself(tiny_dir, tmp_path):
    """Pause, update, resume around a request in flight; fingerprints agree; spans tell the versions apart."""
    publisher = FilesystemPublisher(tmp_path / "broadcasts", SyncConfig(fingerprint="full"))
    record = publisher.publish(1, lab.build("qwen3", seed=1).named_parameters())

    async def run(engine):
        admin = EngineAdmin(engine.base_url, timeout=10)
        await admin.wait_ready("tiny", seconds=10)
        async with aiohttp.ClientSession() as session:
            sampling = {"seed": 1, "max_tokens": 400, "ignore_eos": True}
            flying = asyncio.create_task(inference_contract.generate(session, engine, **sampling))
            await inference_contract.until(lambda: engine.sampler.generated_tokens >= 5)
            await admin.pause()
            frozen_at = engine.sampler.generated_tokens
            update = await admin.update_weights(record.path, 1)
            assert engine.sampler.generated_tokens == frozen_at
            await admin.resume()
            answer = await flying
        await admin.aclose()
        return update, answer, frozen_at

    with engine_server.serving(tiny_dir, max_length=128) as engine:
        update, answer, frozen_at = asyncio.run(run(engine))
    assert (update["version"], update["fingerprint"]) == (1, record.fingerprint)
    assert update["seconds"] > 0
    spans = answer["choices"][0]["weight_versions"]
    assert spans == [{"version": 0, "tokens": frozen_at}, {"version": 1, "tokens": 123 - frozen_at}]


def test_update_faults_are_told_apart(tiny_dir, model_dirs, tmp_path):
    async def run(engine):
        async with aiohttp.ClientSession() as session:
            url = f"{engine.base_url}/update_weights"
            bodies = [
                {"weight_dir": str(model_dirs("llama")), "version": 1},
                {"weight_dir": str(tmp_path / "nothing"), "version": 1},
                {"weight_dir": str(tiny_dir)},
                {"weight_dir": None, "version": 1},
            ]
            return [await inference_contract.post(session, url, body) for body in bodies]

    with engine_server.serving(tiny_dir) as engine:
        answers = asyncio.run(run(engine))
        assert engine.sampler.version == 0
    assert [status for status, _ in answers] == [400, 503, 400, 400]
    assert "do not fit" in answers[0][1]["error"]["message"]


def test_other_ways_to_pause_are_refused(engine):
    async def run():
        async with aiohttp.ClientSession() as session:
            return await inference_contract.post(session, f"{engine.base_url}/pause?mode=abort", {})

    status, answer = asyncio.run(run())
    assert status == 400
    assert "mode=keep" in answer["error"]["message"]
    assert not engine.sampler.busy


def test_a_frozen_engine_takes_no_weights(tiny_dir):
    async def run(engine):
        async with aiohttp.ClientSession() as session:
            body = {"weight_dir": str(tiny_dir), "version": 1}
            return await inference_contract.post(session, f"{engine.base_url}/update_weights", body)

    with engine_server.serving(tiny_dir, frozen=True) as engine:
        status, answer = asyncio.run(run(engine))
    assert status == 400
    assert "frozen model tiny" in answer["error"]["message"]


def test_scorer_equals_a_forward(engine, tiny_model):
    tokens = [4, 20, 30, 40, 50, 60, 7]

    async def run():
        scorer = LogprobScorer(engine.base_url + "/v1", "tiny")
        try:
            return await asyncio.gather(*(scorer.score(tokens[:n], cache_salt="v1") for n in (7, 1, 3)))
        finally:
            await scorer.aclose()

    scores, first, short = asyncio.run(run())
    expected = lab.reference_logprobs(tiny_model, tokens[:1], tokens[1:], 1.0)
    assert scores == pytest.approx([0.0, *expected], abs=1e-4)
    assert first == [0.0]
    assert short == pytest.approx(scores[:3], abs=1e-5)


def test_diverged_weights_are_a_server_error(tiny_dir):
    async def run(engine):
        async with aiohttp.ClientSession() as session:
            generate = f"{engine.base_url}/inference/v1/generate"
            chat = f"{engine.base_url}/v1/chat/completions"
            tokens = await inference_contract.post(session, generate, {"token_ids": [4, 5]})
            text = await inference_contract.post(session, chat, inference_contract.chat(engine))
            events = await inference_contract.stream(
                session, chat, inference_contract.chat(engine, stream=True)
            )
            return tokens, text, events

    with engine_server.serving(tiny_dir) as engine:
        engine.sampler.model.weights.norm.fill_(float("nan"))
        tokens, text, events = asyncio.run(run(engine))
    for status, answer in (tokens, text):
        assert status == 500
        assert "not finite" in answer["error"]["message"]
    assert "not finite" in events[-1]["error"]["message"]


def test_a_dead_sampler_fails_what_waits_and_what_comes(tiny_dir, monkeypatch):
    async def run(engine):
        async with aiohttp.ClientSession() as session:
            body = {"token_ids": [4, 5], "sampling_params": {"max_tokens": 4}}
            url = f"{engine.base_url}/inference/v1/generate"
            answers = [await inference_contract.post(session, url, body) for _ in range(2)]
            async with session.get(f"{engine.base_url}/health") as response:
                return answers, response.status

    with engine_server.serving(tiny_dir) as engine:
        monkeypatch.setattr(engine.sampler, "step", lambda: 1 / 0)
        answers, health = asyncio.run(run(engine))
    assert [status for status, _ in answers] == [503, 503]
    assert "division by zero" in answers[0][1]["error"]["message"]
    assert health == 503
