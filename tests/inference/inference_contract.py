"""What every engine must do over HTTP, as functions of a session and an `Engine`.

The tests run them against the embedded engine; an engine started elsewhere passes through the same list.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from typing import Any

import aiohttp
from engine_server import Engine

PROMPT = [4, 20, 30, 40, 50]


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, Any]:
    async with session.post(url, json=body) as response:
        return response.status, await response.json(content_type=None)


async def generate(session, engine: Engine, prompt=PROMPT, **sampling) -> dict:
    body = {"model": engine.model, "token_ids": prompt, "sampling_params": {"logprobs": 1, **sampling}}
    status, answer = await post(session, f"{engine.base_url}/inference/v1/generate", body)
    assert status == 200, answer
    return answer


async def models_lists_the_model_and_its_context(session, engine):
    async with session.get(f"{engine.base_url}/v1/models") as response:
        cards = (await response.json())["data"]
    card = next(card for card in cards if card["id"] == engine.model)
    assert card["max_model_len"] == engine.max_model_len


async def health_and_liveness_answer(session, engine):
    for path in ("health", "liveness"):
        async with session.get(f"{engine.base_url}/{path}") as response:
            assert response.status == 200, path


async def generate_returns_one_logprob_for_each_token(session, engine):
    answer = await generate(session, engine, temperature=1.0, max_tokens=12)
    choice = answer["choices"][0]
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] <= 1e-6 for entry in entries)
    assert choice["finish_reason"] in ("stop", "length")
    assert answer["request_id"]


async def generate_respects_max_tokens(session, engine):
    answer = await generate(session, engine, max_tokens=3, ignore_eos=True)
    assert len(answer["choices"][0]["token_ids"]) == 3
    assert answer["choices"][0]["finish_reason"] == "length"


async def generate_without_max_tokens_fills_the_context(session, engine):
    answer = await generate(session, engine, ignore_eos=True)
    assert len(answer["choices"][0]["token_ids"]) == engine.max_model_len - len(PROMPT)


async def generate_returns_the_stop_token(session, engine):
    free = (await generate(session, engine, seed=5, max_tokens=10, ignore_eos=True))["choices"][0][
        "token_ids"
    ]
    sampling = {"seed": 5, "max_tokens": 10, "ignore_eos": True, "stop_token_ids": [free[4]]}
    choice = (await generate(session, engine, **sampling))["choices"][0]
    assert choice["token_ids"] == free[: free.index(free[4]) + 1]
    assert choice["finish_reason"] == "stop"


async def generate_is_repeatable_with_a_seed(session, engine):
    first, second = [await generate(session, engine, seed=7, max_tokens=10) for _ in range(2)]
    assert first["choices"][0]["token_ids"] == second["choices"][0]["token_ids"]


async def generate_is_greedy_at_temperature_zero(session, engine):
    answers = [await generate(session, engine, temperature=0, max_tokens=8) for _ in range(2)]
    assert answers[0]["choices"][0]["token_ids"] == answers[1]["choices"][0]["token_ids"]


async def generate_ignores_unknown_keys(session, engine):
    body = {
        "model": engine.model,
        "token_ids": PROMPT,
        "sampling_params": {"max_tokens": 2, "skip_special_tokens": False, "routed_experts_prompt_start": 3},
        "cache_salt": "v12",
        "priority": 1,
    }
    status, _ = await post(session, f"{engine.base_url}/inference/v1/generate", body)
    assert status == 200


async def generate_scores_the_prompt(session, engine):
    sampling = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1}
    scores = (await generate(session, engine, **sampling))["prompt_logprobs"]
    assert len(scores) == len(PROMPT)
    assert scores[0] is None
    for token, entry in zip(PROMPT[1:], scores[1:], strict=True):
        assert entry[str(token)]["logprob"] < 0


async def sampled_logprobs_equal_scores_of_the_same_tokens(session, engine):
    choice = (await generate(session, engine, seed=1, max_tokens=10))["choices"][0]
    whole = PROMPT + choice["token_ids"]
    scores = (await generate(session, engine, whole, max_tokens=1, prompt_logprobs=1))["prompt_logprobs"]
    for token, entry, score in zip(
        choice["token_ids"], choice["logprobs"]["content"], scores[len(PROMPT) :], strict=True
    ):
        assert abs(entry["logprob"] - score[str(token)]["logprob"]) < 1e-4


async def bad_requests_are_refused_with_a_reason(session, engine):
    url = f"{engine.base_url}/inference/v1/generate"
    long = [20] * (engine.max_model_len + 1)
    cases = [
        {"token_ids": []},
        {"token_ids": long},
        {"token_ids": [engine.vocab_size]},
        {"token_ids": "text"},
        {"sampling_params": {}},
        {"token_ids": PROMPT, "sampling_params": {"temperature": -1}},
        {"token_ids": PROMPT, "sampling_params": {"max_tokens": 0}},
        {"token_ids": PROMPT, "sampling_params": []},
        [],
    ]
    for body in cases:
        status, answer = await post(session, url, {"model": engine.model, **body} if body else body)
        assert status == 400, body
        assert len(answer["error"]["message"]) > 8, body
    async with session.post(url, data=b"{not json") as response:
        assert response.status == 400


async def an_overlong_prompt_is_named_as_such(session, engine):
    body = {"model": engine.model, "token_ids": [20] * (engine.max_model_len + 1), "sampling_params": {}}
    _, answer = await post(session, f"{engine.base_url}/inference/v1/generate", body)
    assert "maximum context length" in answer["error"]["message"]


async def another_model_is_not_found(session, engine):
    body = {"model": "other", "token_ids": PROMPT, "sampling_params": {}}
    status, answer = await post(session, f"{engine.base_url}/inference/v1/generate", body)
    assert status == 404
    assert engine.model in answer["error"]["message"]


async def many_requests_run_together(session, engine):
    answers = await asyncio.gather(
        *(generate(session, engine, [4, 20 + i], seed=i, max_tokens=6, ignore_eos=True) for i in range(40))
    )
    assert [len(answer["choices"][0]["token_ids"]) for answer in answers] == [6] * 40
    alone = await generate(session, engine, [4, 33], seed=13, max_tokens=6, ignore_eos=True)
    assert alone["choices"][0]["token_ids"] == answers[13]["choices"][0]["token_ids"]


async def pause_freezes_and_resume_continues(session, engine):
    expected = await generate(session, engine, seed=3, max_tokens=30, ignore_eos=True)
    async with session.post(f"{engine.base_url}/pause") as response:
        assert response.status == 200
    waiting = asyncio.create_task(generate(session, engine, seed=3, max_tokens=30, ignore_eos=True))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)
    assert not done
    async with session.post(f"{engine.base_url}/resume") as response:
        assert response.status == 200
    assert (await waiting)["choices"][0]["token_ids"] == expected["choices"][0]["token_ids"]


async def a_client_that_leaves_frees_its_place(session, engine):
    async with session.post(f"{engine.base_url}/pause"):
        pass
    left = asyncio.create_task(generate(session, engine, max_tokens=30, ignore_eos=True))
    await asyncio.sleep(0.1)
    if engine.sampler is not None:  # vLLM counts while it schedules, which it does not while it is paused
        for _ in range(3000):
            if waits := await gauge(session, engine, "vllm:num_requests_waiting") == 1:
                break
            await asyncio.sleep(0.02)
        assert waits
    left.cancel()
    async with session.post(f"{engine.base_url}/resume"):
        pass
    await idle(session, engine)


async def a_stream_that_is_closed_frees_its_place(session, engine):
    body = chat(engine, stream=True, ignore_eos=True, n=2)
    async with session.post(f"{engine.base_url}/v1/chat/completions", json=body) as response:
        await response.content.readline()
        response.close()
    await idle(session, engine)


async def idle(session, engine) -> None:
    """Wait until nothing runs and nothing waits, three looks in a row: a request may be on its way in."""
    quiet = 0
    for _ in range(3000):
        busy = [await gauge(session, engine, f"vllm:num_requests_{kind}") for kind in ("running", "waiting")]
        quiet = quiet + 1 if busy == [0, 0] else 0
        if quiet == 3:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still busy: {busy}")


async def until(condition: Callable[[], bool]) -> None:
    """Wait, up to a minute, for something that the test process can see."""
    for _ in range(60_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come true")


async def metrics_carry_the_names_that_are_read(session, engine):
    await idle(session, engine)
    before = await gauge(session, engine, "vllm:generation_tokens_total")
    await generate(session, engine, max_tokens=4, ignore_eos=True)
    assert await gauge(session, engine, "vllm:generation_tokens_total") == before + 4
    assert await gauge(session, engine, "vllm:prompt_tokens_total") >= len(PROMPT)
    assert 0 <= await gauge(session, engine, "vllm:kv_cache_usage_perc") <= 1


async def gauge(session, engine, name: str) -> float:
    async with session.get(f"{engine.base_url}/metrics") as response:
        text = await response.text()
    lines = [line for line in text.splitlines() if line.startswith((name + "{", name + " "))]
    assert lines, f"{name} is not in /metrics"
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


async def chat_answers_text_and_usage(session, engine):
    body = chat(engine, max_tokens=6, seed=1, n=3, ignore_eos=True)
    status, answer = await post(session, f"{engine.base_url}/v1/chat/completions", body)
    assert status == 200, answer
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert all(choice["message"]["role"] == "assistant" for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 18
    assert answer["usage"]["prompt_tokens"] > 0
    assert answer["object"] == "chat.completion"


async def chat_streams_the_same_text(session, engine):
    body = chat(engine, max_tokens=12, temperature=0)
    _, whole = await post(session, f"{engine.base_url}/v1/chat/completions", body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    events = await stream(session, f"{engine.base_url}/v1/chat/completions", {**body, **options})
    deltas = [event["choices"][0] for event in events if event["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in deltas)
    assert text == whole["choices"][0]["message"]["content"]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert deltas[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-1]["usage"][key] for key in counts] == [whole["usage"][key] for key in counts]
    assert all(event["object"] == "chat.completion.chunk" for event in events)


async def chat_streams_every_choice(session, engine):
    body = chat(engine, max_tokens=7, seed=2, n=2, ignore_eos=True)
    _, whole = await post(session, f"{engine.base_url}/v1/chat/completions", body)
    events = await stream(session, f"{engine.base_url}/v1/chat/completions", {**body, "stream": True})
    texts = {0: "", 1: ""}
    for choice in (choice for event in events for choice in event["choices"]):
        texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == {c["index"]: c["message"]["content"] for c in whole["choices"]}
    assert texts[0] != texts[1]


async def completions_take_text_and_ids(session, engine):
    url = f"{engine.base_url}/v1/completions"
    for prompt in ("ab", [20, 30], ["ab", "cd"]):
        body = {"model": engine.model, "prompt": prompt, "max_tokens": 4, "temperature": 0}
        status, answer = await post(session, url, body)
        assert status == 200, answer
        assert len(answer["choices"]) == (2 if prompt == ["ab", "cd"] else 1)
        assert all(isinstance(choice["text"], str) for choice in answer["choices"])


async def chat_refuses_what_is_no_conversation(session, engine):
    for messages in (None, [], "hello", [{"content": "no role"}]):
        body = {"model": engine.model, "messages": messages}
        status, answer = await post(session, f"{engine.base_url}/v1/chat/completions", body)
        assert status == 400, messages
        assert answer["error"]["message"]


def chat(engine: Engine, **options) -> dict:
    return {"model": engine.model, "messages": [{"role": "user", "content": "hello"}], **options}


async def stream(session, url: str, body: dict) -> list[dict]:
    """Events of a server-sent stream, which must close with [DONE]."""
    async with session.post(url, json=body) as response:
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [line[6:] for line in (await response.text()).split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


CONTRACT = [
    models_lists_the_model_and_its_context,
    health_and_liveness_answer,
    generate_returns_one_logprob_for_each_token,
    generate_respects_max_tokens,
    generate_without_max_tokens_fills_the_context,
    generate_returns_the_stop_token,
    generate_is_repeatable_with_a_seed,
    generate_is_greedy_at_temperature_zero,
    generate_ignores_unknown_keys,
    generate_scores_the_prompt,
    sampled_logprobs_equal_scores_of_the_same_tokens,
    bad_requests_are_refused_with_a_reason,
    an_overlong_prompt_is_named_as_such,
    another_model_is_not_found,
    many_requests_run_together,
    pause_freezes_and_resume_continues,
    a_client_that_leaves_frees_its_place,
    a_stream_that_is_closed_frees_its_place,
    metrics_carry_the_names_that_are_read,
    chat_answers_text_and_usage,
    chat_streams_the_same_text,
    chat_streams_every_choice,
    completions_take_text_and_ids,
    chat_refuses_what_is_no_conversation,
]
