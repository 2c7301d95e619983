"""Retries, time-outs and errors of the clients, against servers that misbehave."""

import asyncio
import contextlib
import time

import pytest
from aiohttp import web

from prl.inference import client
from prl.inference.client import ROUTES, EngineAdmin, LogprobScorer
from prl.sync.offer import Offer, OfferedTensor, write_offer


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(client, "LONGEST_WAIT", 0.04)
    monkeypatch.setattr(client, "READY_POLL_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def server(routes):
    """Serve {(method, path): handler}; yields the URL and the list of calls."""
    calls = []
    app = web.Application()
    for (method, path), handler in routes.items():

        def wrap(handler=handler):
            async def answer(request):
                calls.append((request, await request.read()))
                result = handler(len(calls), request)
                return await result if asyncio.iscoroutine(result) else result

            return answer

        app.router.add_route(method, path, wrap())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", calls
    finally:
        await runner.cleanup()


def failing(times, status=500):
    """Fail so many times, then answer."""

    def handler(count, request):
        if count <= times:
            return web.json_response({"error": {"message": f"failure {count}"}}, status=status)
        return web.json_response({"version": 3, "fingerprint": "f", "seconds": 0.1})

    return handler


async def with_admin(routes, act, seconds=5.0):
    async with server(routes) as (url, calls):
        admin = EngineAdmin(url, seconds)
        try:
            return await act(admin), calls
        finally:
            await admin.aclose()


UPDATE = ("POST", "/update_weights")


def update(admin):
    return admin.update_weights("/weights", 3)


def test_an_engine_is_named_by_its_address():
    assert str(EngineAdmin("http://host:8000/v1/", 1.0)) == "engine http://host:8000"


def test_server_errors_are_retried():
    answer, calls = asyncio.run(with_admin({UPDATE: failing(3, 503)}, update))
    assert answer["version"] == 3
    assert len(calls) == 4
    assert calls[-1][1] == b'{"weight_dir": "/weights", "version": 3}'


def test_at_most_ten_attempts():
    counted = []

    async def act(admin):
        with pytest.raises(ConnectionError, match=r"update_weights failed 10 times; last: .*failure 10"):
            await update(admin)

    _, counted = asyncio.run(with_admin({UPDATE: failing(99)}, act))
    assert len(counted) == 10


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_client_errors_are_final_and_speak_the_engines_words(status):
    async def act(admin):
        with pytest.raises(ValueError, match=f"{status}: failure 1"):
            await update(admin)

    _, calls = asyncio.run(with_admin({UPDATE: failing(1, status)}, act))
    assert len(calls) == 1


def test_an_error_without_json_is_quoted():
    async def act(admin):
        with pytest.raises(ValueError, match="400: plain words"):
            await admin.pause()

    handler = {("POST", "/pause"): lambda count, request: web.Response(status=400, text="plain words")}
    asyncio.run(with_admin(handler, act))


def test_an_attempt_is_bounded_and_the_budget_too():
    async def hang(count, request):
        await asyncio.sleep(30)

    async def act(admin):
        started = time.monotonic()
        with pytest.raises(ConnectionError, match=r"/resume failed \d times; last: .*[Tt]imeout"):
            await admin.resume()
        return time.monotonic() - started

    routes = {("POST", "/resume"): lambda count, request: hang(count, request)}
    seconds, calls = asyncio.run(with_admin(routes, act, seconds=0.2))
    assert 0.3 < seconds < 1.5
    assert 2 <= len(calls) <= 3


def test_an_attempt_that_hangs_is_followed_by_one_that_does_not():
    async def answer(count, request):
        if count == 1:
            await asyncio.sleep(30)
        return web.json_response({})

    routes = {("POST", "/resume"): lambda count, request: answer(count, request)}
    _, calls = asyncio.run(with_admin(routes, lambda admin: admin.resume(), seconds=0.2))
    assert len(calls) == 2


def test_a_refused_connection_is_retried(unused_port):
    async def run():
        admin = EngineAdmin(f"http://127.0.0.1:{unused_port}", timeout=0.1)
        with pytest.raises(ConnectionError, match="ClientConnectorError"):
            await admin.pause()
        await admin.aclose()

    asyncio.run(run())


@pytest.fixture
def unused_port():
    """A port that is bound but not listened on, so that connecting to it is refused."""
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def test_pause_asks_to_keep():
    _, calls = asyncio.run(
        with_admin({("POST", "/pause"): lambda count, request: web.Response()}, lambda admin: admin.pause())
    )
    assert calls[0][0].query == {"mode": "keep", "clear_cache": "false"}


def listing(*models):
    return lambda count, request: web.json_response({"data": [{"id": model} for model in models]})


HEALTH, MODELS = ("GET", "/health"), ("GET", "/v1/models")


def test_ready_once_healthy_and_listed():
    routes = {HEALTH: failing(3, 503), MODELS: listing("base", "tiny")}
    _, calls = asyncio.run(with_admin(routes, lambda admin: admin.wait_ready("tiny", seconds=5)))
    assert len(calls) == 5


def test_ready_without_a_health_route():
    asyncio.run(with_admin({MODELS: listing("tiny")}, lambda admin: admin.wait_ready("tiny", seconds=5)))


def test_an_engine_with_another_model_is_named():
    async def act(admin):
        with pytest.raises(ValueError, match="serves other, not 'tiny'"):
            await admin.wait_ready("tiny", seconds=5)

    asyncio.run(with_admin({HEALTH: failing(0), MODELS: listing("other")}, act))


def test_an_engine_without_the_models_route_is_named():
    async def act(admin):
        with pytest.raises(ValueError, match="/v1/models: 404"):
            await admin.wait_ready("tiny", seconds=5)

    asyncio.run(with_admin({HEALTH: failing(0)}, act))


def test_waiting_for_an_engine_ends():
    async def act(admin):
        with pytest.raises(TimeoutError, match=r"not ready within 0 s; last: .*failure"):
            await admin.wait_ready("tiny", seconds=0.2)

    asyncio.run(with_admin({HEALTH: failing(10_000, 503)}, act))


GENERATE = ("POST", "/inference/v1/generate")


async def with_scorer(answer, act, **options):
    async with server({GENERATE: lambda count, request: web.json_response(answer)}) as (url, calls):
        scorer = LogprobScorer(f"{url}/v1", "teacher", timeout=2.0, **options)
        try:
            return await act(scorer), calls
        finally:
            await scorer.aclose()


def test_scores_are_those_of_the_prompts_own_tokens():
    answer = {
        "prompt_logprobs": [None, {"9": {"logprob": -0.1}, "20": {"logprob": -2.5}}, {"30": {"logprob": -1}}]
    }
    scores, calls = asyncio.run(
        with_scorer(answer, lambda scorer: scorer.score([4, 20, 30], cache_salt="v7"))
    )
    assert scores == [0.0, -2.5, -1.0]
    body = calls[0][1].decode()
    assert '"prompt_logprobs": 1' in body
    assert '"max_tokens": 1' in body
    assert '"cache_salt": "v7"' in body


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "no prompt_logprobs for 2 tokens"),
        ({"prompt_logprobs": [None]}, "1 prompt_logprobs for 2 tokens"),
        ({"prompt_logprobs": [None, {"5": {"logprob": -1}}]}, "no entry for the prompt's token 20"),
    ],
)
def test_an_answer_that_does_not_score_every_token_is_refused(answer, message):
    async def act(scorer):
        with pytest.raises(ValueError, match=message):
            await scorer.score([4, 20])

    asyncio.run(with_scorer(answer, act))


def test_key_and_headers_are_sent(monkeypatch):
    monkeypatch.setenv("SOME_KEY", "secret")
    answer = {"prompt_logprobs": [None]}
    options = {"api_key_var": "SOME_KEY", "headers": {"X-Team": "a"}}
    _, calls = asyncio.run(with_scorer(answer, lambda scorer: scorer.score([4]), **options))
    assert calls[0][0].headers["Authorization"] == "Bearer secret"
    assert calls[0][0].headers["X-Team"] == "a"
    monkeypatch.delenv("SOME_KEY")
    _, calls = asyncio.run(with_scorer(answer, lambda scorer: scorer.score([4]), **options))
    assert "Authorization" not in calls[0][0].headers


def test_an_engine_without_the_routes_of_training_is_refused_by_name():
    """A plain server of completions is healthy and serves the model, but takes no weights."""

    async def run():
        app = web.Application()
        app.router.add_get("/v1/models", lambda _: web.json_response({"data": [{"id": "m"}]}))
        app.router.add_post("/inference/v1/generate", lambda _: web.json_response({}))
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        admin = EngineAdmin(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", 5, routes=ROUTES)
        try:
            await admin.wait_ready("m", seconds=5)
        finally:
            await admin.aclose()
            await runner.cleanup()

    with pytest.raises(ValueError, match=r"has no /pause, /resume, /update_weights: start the engine by"):
        asyncio.run(run())


def test_admin_calls_carry_headers_and_key(monkeypatch):
    monkeypatch.setenv("MY_KEY", "secret")
    seen = {}

    async def remember(request):
        seen.update(request.headers)
        return web.json_response({})

    async def run():
        app = web.Application()
        app.router.add_post("/resume", remember)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        admin = EngineAdmin(f"http://127.0.0.1:{runner.addresses[0][1]}", 5, {"X-Team": "a"}, "MY_KEY")
        await admin.resume()
        await admin.aclose()
        await runner.cleanup()

    asyncio.run(run())
    assert (seen["Authorization"], seen["X-Team"]) == ("Bearer secret", "a")


def test_a_broadcast_is_joined_once_and_received_without_a_second_try(tmp_path):
    """Files are asked for again after a server error; a broadcast never is."""
    calls = []

    async def answer(request):
        calls.append((request.path, await request.json() if request.can_read_body else None))
        if request.path == "/update_weights" and len(calls) > 3:
            return web.json_response({"error": {"message": "broke off"}}, status=500)
        return web.json_response({"world_size": 3, "version": 1, "fingerprint": "f"})

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        admin = EngineAdmin(f"http://127.0.0.1:{runner.addresses[0][1]}", 5)
        try:
            for version in (1, 2):
                directory = tmp_path / f"step_{version}"
                tensors = (OfferedTensor("w", "float32", (2,)),)
                write_offer(directory, Offer("session", "127.0.0.1", 77, 4.0, 10, tensors, None))
                await admin.update_weights(str(directory), version)
        finally:
            await admin.aclose()
            await runner.cleanup()

    with pytest.raises(ConnectionError, match=r"is not repeated: .*broke off"):
        asyncio.run(run())
    assert [path for path, _ in calls] == [
        "/world_size",
        "/init_broadcaster",
        "/update_weights",
        "/update_weights",
    ]
    joined = calls[1][1]
    assert (joined["rank_offset"], joined["inference_world_size"], joined["port"]) == (1, 3, 77)
    assert (joined["session_id"], joined["timeout"], joined["host"]) == ("session", 4.0, "127.0.0.1")
