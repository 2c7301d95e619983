"""The compact answer to `/inference/v1/generate`, with an engine that finishes requests as vLLM does."""

import asyncio
import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest

from prl.inference import vllm_generate
from prl.inference.vllm_admin import AdminMiddleware
from prl.inference.vllm_generate import answer, expressible

BODY = {"model": "policy", "token_ids": [5, 6], "sampling_params": {"logprobs": 1, "temperature": 0.5}}


def flat(*positions):
    """vLLM's FlatLogprobs of positions that are lists of (token, logprob, rank)."""
    made = SimpleNamespace(start_indices=[], end_indices=[], token_ids=[], logprobs=[], ranks=[])
    for position in positions:
        made.start_indices.append(len(made.logprobs))
        for token, value, rank in position:
            made.token_ids.append(token)
            made.logprobs.append(value)
            made.ranks.append(rank)
        made.end_indices.append(len(made.logprobs))
    return made


def output(index=0, tokens=(30, 7), logprobs=((30, -0.25, 1), (7, -1.5, 2)), reason="stop", **more):
    scores = None if logprobs is None else flat(*([entry] for entry in logprobs))
    return SimpleNamespace(index=index, token_ids=tokens, logprobs=scores, finish_reason=reason, **more)


def finished(*outputs, prompt=(5, 6), prompt_logprobs=None):
    return SimpleNamespace(
        outputs=list(outputs), prompt_token_ids=list(prompt), prompt_logprobs=prompt_logprobs
    )


def test_an_answer_holds_what_the_train_client_reads():
    parsed = json.loads(answer("r", finished(output())))
    assert parsed["request_id"] == "r"
    (choice,) = parsed["choices"]
    assert choice["index"] == 0 and choice["token_ids"] == [30, 7] and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["content"] == [
        {"token": "token_id:30", "logprob": -0.25},
        {"token": "token_id:7", "logprob": -1.5},
    ]
    assert parsed["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert "prompt_logprobs" not in parsed


def test_the_train_clients_own_parser_accepts_it():
    client = pytest.importorskip("renderers.client")
    parsed = client.parse_generate_response(answer("r", finished(output())))
    choice = parsed["choices"][0]
    assert client._parse_completion_logprobs(choice, choice["token_ids"]) == [-0.25, -1.5]


def test_every_float32_comes_back_exactly():
    import numpy

    values = numpy.random.default_rng(0).normal(scale=5, size=500).astype(numpy.float32)
    entries = [(3, -abs(value).item(), 1) for value in values]
    content = json.loads(answer("r", finished(output(tokens=[3] * 500, logprobs=entries))))
    read = [entry["logprob"] for entry in content["choices"][0]["logprobs"]["content"]]
    assert (numpy.array(read, dtype=numpy.float32) == -abs(values)).all()


def test_choices_come_in_order_with_the_versions_that_sampled_them():
    spans = [SimpleNamespace(version="3", start=0, end=1), SimpleNamespace(version="4", start=1, end=2)]
    text = answer("r", finished(output(1, weight_versions=None), output(0, weight_versions=spans)))
    choices = json.loads(text)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    assert choices[0]["weight_versions"] == [
        {"version": "3", "start": 0, "end": 1},
        {"version": "4", "start": 1, "end": 2},
    ]
    assert choices[1]["weight_versions"] == []


def test_prompt_scores_name_each_token_once():
    scores = flat([], [(6, -2.0, 9), (8, -0.5, 1)], [(6, -0.125, 1), (6, -0.125, 1)])
    parsed = json.loads(answer("r", finished(output(), prompt=(5, 6, 6), prompt_logprobs=scores)))
    assert parsed["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -2.0, "rank": 9}, "8": {"logprob": -0.5, "rank": 1}},
        {"6": {"logprob": -0.125, "rank": 1}},
    ]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_what_is_no_number_stays_json(value):
    parsed = json.loads(answer("r", finished(output(tokens=[4], logprobs=[(4, value, 1)]))))
    assert parsed["choices"][0]["logprobs"]["content"] == [{"token": "token_id:4", "logprob": -9999.0}]


def test_without_logprobs_there_are_none_and_a_failure_is_no_answer():
    assert json.loads(answer("r", finished(output(logprobs=None))))["choices"][0]["logprobs"] is None
    with pytest.raises(RuntimeError, match="failed"):
        answer("r", finished(output(reason="error")))


def body(**changes):
    return json.dumps({**BODY, **changes}).encode()


def test_plain_requests_are_expressible_and_null_means_not_given():
    params = {
        "logprobs": 1,
        "seed": None,
        "stop": None,
        "stop_token_ids": [7],
        "unknown_param": 3,
    }
    asked = expressible(body(sampling_params=params, priority=2, stream=False, new_key="x"), "policy")
    assert asked.token_ids == [5, 6] and asked.priority == 2
    assert asked.params == {"logprobs": 1, "stop_token_ids": [7], "unknown_param": 3}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "other"},
        {"stream": True},
        {"features": {"mm_hashes": {}}},
        {"output_mode": "text"},
        {"token_ids": []},
        {"token_ids": [5, -1]},
        {"token_ids": [5, True]},
        {"token_ids": "text"},
        {"sampling_params": None},
        {"sampling_params": {"stop": ["x"]}},
        {"sampling_params": {"logprobs": 5}},
        {"sampling_params": {"logprobs": -1}},
    ],
    ids=str,
)
def test_the_rest_is_left_to_vllm(changes):
    assert expressible(body(), "policy") is not None
    assert expressible(body(**changes), "policy") is None


@pytest.mark.parametrize("text", [b"{broken", b"[]", b"", b"null"])
def test_what_is_no_request_is_left_to_vllm(text):
    assert expressible(text, "policy") is None


class NewRefusal(Exception):
    """What newer releases refuse requests with is no ValueError."""


class Client:
    """An engine client; `work` makes the outputs of one request."""

    errored = False

    def __init__(self, work, policy="fcfs"):
        self.work, self.asked, self.cancelled = work, None, False
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(policy=policy))

    async def generate(self, prompt, params, request_id, **options):
        self.asked = (prompt, params, request_id, options)
        try:
            yield await self.work()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.fixture
def engine(monkeypatch):
    """vLLM's module of inputs, the middleware's settings, and the parameters as they were asked for."""
    inputs = ModuleType("vllm.inputs.engine")
    inputs.tokens_input = lambda ids, cache_salt: {"ids": ids, "salt": cache_salt}
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.inputs", ModuleType("vllm.inputs"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "vllm.inputs.engine", inputs)
    exceptions = ModuleType("vllm.exceptions")
    exceptions.VLLMError = NewRefusal
    monkeypatch.setitem(sys.modules, "vllm.exceptions", exceptions)
    sys.modules["vllm"].exceptions = exceptions
    monkeypatch.setattr(vllm_generate, "engine_params", lambda params: params)
    from prl.inference import vllm_admin

    monkeypatch.setattr(vllm_admin, "SETTINGS", vllm_admin.Settings(model="policy", updates=4))


def ask(client, request=None, leaves=False, adapters=None, middleware=(), headers=()):
    """(status, body) of a POST through the middleware; vLLM's own handler answers 299 with what it got."""
    sent, inbox = [], [{"type": "http.request", "body": request or body(), "more_body": False}]

    async def inner(scope, receive, send):
        message = await receive()
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": message["body"]})

    async def receive():
        if not inbox and not leaves:
            await asyncio.sleep(60)
        return inbox.pop() if inbox else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    models = SimpleNamespace(lora_requests=adapters or {})
    state = SimpleNamespace(engine_client=client, openai_serving_models=models)
    app = SimpleNamespace(state=state, user_middleware=middleware)
    scope = {"type": "http", "method": "POST", "path": "/inference/v1/generate", "app": app}
    asyncio.run(AdminMiddleware(inner)({**scope, "headers": list(headers)}, receive, send))
    return (sent[0]["status"], sent[1]["body"]) if sent else None


async def done():
    return finished(output())


def test_the_engine_is_asked_with_the_current_salt_and_adapter(engine):
    client = Client(done)
    status, text = ask(client, adapters={"policy": "the adapter", "other": "no"})
    assert status == 200 and json.loads(text)["choices"][0]["token_ids"] == [30, 7]
    prompt, params, _, options = client.asked
    assert prompt == {"ids": [5, 6], "salt": "prl-4"}
    assert params == BODY["sampling_params"]
    assert options == {"lora_request": "the adapter", "priority": 0}


def test_priorities_count_where_the_scheduler_has_them(engine):
    client = Client(done, policy="priority")
    ask(client, body(priority=-3))
    assert client.asked[3]["priority"] == -3


def test_long_answers_are_written_off_the_loop(engine, monkeypatch):
    monkeypatch.setattr(vllm_generate, "INLINE_TOKENS", 1)
    assert ask(Client(done))[0] == 200


def test_a_client_that_leaves_ends_its_request(engine):
    client = Client(lambda: asyncio.sleep(60))
    started = time.monotonic()
    assert ask(client, leaves=True) is None
    assert client.cancelled and time.monotonic() - started < 50


@pytest.mark.parametrize("refusal", [ValueError, NewRefusal])
def test_what_the_engine_refuses_is_answered_by_vllm(engine, refusal):
    async def refuse():
        raise refusal("too long")

    status, text = ask(Client(refuse))
    assert status == 299
    assert json.loads(text) == {**BODY, "cache_salt": "prl-4"}


def test_other_failures_are_told_and_a_dead_engine_is_vllms(engine):
    async def fail():
        raise RuntimeError("out of memory")

    status, text = ask(Client(fail))
    assert status == 500 and "out of memory" in json.loads(text)["error"]["message"]
    dead = Client(done)
    dead.errored = True
    assert ask(dead)[0] == 299 and dead.asked is None


class AuthenticationMiddleware:
    def __init__(self, app, tokens):
        self.tokens = tokens

    def verify_token(self, headers):
        return headers.get("Authorization") in self.tokens


@pytest.mark.parametrize(("key", "status"), [(b"right", 200), (b"wrong", 299)])
def test_a_server_with_a_key_lets_vllm_refuse_the_others(engine, key, status):
    pytest.importorskip("starlette")
    guard = SimpleNamespace(cls=AuthenticationMiddleware, args=(), kwargs={"tokens": ["right"]})
    client = Client(done)
    assert ask(client, middleware=[guard], headers=[(b"authorization", key)])[0] == status
    assert (client.asked is None) == (status == 299)
