"""The router: sticky, least loaded, health-aware, streaming; and one engine to whoever administers it."""

import asyncio
import contextlib
import json

import aiohttp
import pytest
from aiohttp import web
from inference_contract import until

from prl.inference.router import SESSION_HEADER, Router


class Stub:
    """An engine that answers by its name and remembers what it was asked."""

    def __init__(self, name, *, fingerprint="full:same", workers=1):
        self.name, self.fingerprint, self.workers = name, fingerprint, workers
        self.asked, self.health, self.gate = [], 200, asyncio.Event()
        self.gate.set()
        self.app = web.Application()
        self.app.router.add_post("/inference/v1/generate", self.generate)
        self.app.router.add_post("/v1/chat/completions", self.chat)
        self.app.router.add_get("/health", self.tell_health)
        self.app.router.add_get("/liveness", self.tell_health)
        self.app.router.add_get("/metrics", self.metrics)
        self.app.router.add_get("/world_size", self.world_size)
        for path in ("/pause", "/resume", "/update_weights", "/init_broadcaster", "/load_lora_adapter"):
            self.app.router.add_post(path, self.admin)

    async def generate(self, request):
        self.asked.append(await request.json())
        await self.gate.wait()
        return web.json_response({"engine": self.name}, status=400 if self.asked[-1].get("bad") else 200)

    async def chat(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await self.gate.wait()
        await response.write(b"data: [DONE]\n\n")
        return response

    async def admin(self, request):
        self.asked.append((request.path_qs, await request.text()))
        return web.json_response({"version": 3, "fingerprint": self.fingerprint, "seconds": 0.1})

    async def tell_health(self, request):
        return web.json_response({}, status=self.health)

    async def world_size(self, request):
        return web.json_response({"world_size": self.workers})

    async def metrics(self, request):
        return web.Response(text=f'# TYPE a gauge\na{{model_name="m"}} {len(self.name)}\nb 2.5\n')


@contextlib.asynccontextmanager
async def listening(app):
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def routed(*stubs):
    """(session, URL of the router, router) before the given engines."""
    async with contextlib.AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(listening(stub.app)) for stub in stubs]
        router = Router(urls)
        url = await stack.enter_async_context(listening(router.app()))
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30))
        )
        yield session, url, router


async def ask(session, url, who=None, **body):
    headers = {SESSION_HEADER: who} if who else {}
    async with session.post(f"{url}/inference/v1/generate", json=body, headers=headers) as response:
        return response.status, await response.json()


def run(scenario):
    return asyncio.run(scenario())


def test_a_session_stays_and_sessions_spread():
    async def scenario():
        async with routed(Stub("a"), Stub("b")) as (session, url, _):
            first = {who: (await ask(session, url, who))[1]["engine"] for who in "pqrs"}
            again = {who: (await ask(session, url, who))[1]["engine"] for who in "srqp"}
            return first, again

    first, again = run(scenario)
    assert first == again
    assert sorted(first.values()) == ["a", "a", "b", "b"]


def test_a_new_session_goes_to_the_least_loaded():
    async def scenario():
        busy, idle = Stub("busy"), Stub("idle")
        async with routed(busy, idle) as (session, url, router):
            busy.gate.clear()
            idle.gate.clear()
            waiting = [asyncio.create_task(ask(session, url, f"s{n}")) for n in range(4)]
            await until(lambda: len(busy.asked) + len(idle.asked) == 4)
            assert [backend.load for backend in router.backends] == [2, 2]
            idle.gate.set()
            await until(lambda: router.backends[1].load == 0)
            fresh = [(await ask(session, url, f"new{n}"))[1]["engine"] for n in range(3)]
            busy.gate.set()
            await asyncio.gather(*waiting)
            return fresh, [backend.load for backend in router.backends]

    fresh, loads = run(scenario)
    assert fresh == ["idle"] * 3 and loads == [0, 0]


def test_a_dead_engine_is_left_and_its_sessions_move():
    async def scenario():
        async with contextlib.AsyncExitStack() as stack:
            stub = Stub("alive")
            alive = await stack.enter_async_context(listening(stub.app))
            router = Router(["http://127.0.0.1:1", alive])
            url = await stack.enter_async_context(listening(router.app()))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await until(lambda: not router.backends[0].healthy)
            answers = [await ask(session, url, f"s{n}") for n in range(3)]
            async with session.get(f"{url}/health") as response:
                return answers, response.status, (await response.json())["error"]["message"]

    answers, health, message = run(scenario)
    assert answers == [(200, {"engine": "alive"})] * 3
    assert health == 503 and "127.0.0.1:1" in message


def test_without_a_healthy_engine_it_says_so():
    async def scenario():
        router = Router(["http://127.0.0.1:1"])
        async with listening(router.app()) as url, aiohttp.ClientSession() as session:
            return [await ask(session, url) for _ in range(2)]

    for status, answer in run(scenario):
        assert status == 503
        assert any(words in answer["error"]["message"] for words in ("no engine", "out of reach"))


def test_an_engines_own_refusal_comes_through():
    async def scenario():
        async with routed(Stub("a")) as (session, url, router):
            return await ask(session, url, bad=True), router.backends[0].healthy

    (status, answer), healthy = run(scenario)
    assert (status, answer) == (400, {"engine": "a"}) and healthy


def test_streams_pass_as_they_come():
    async def scenario():
        stub = Stub("a")
        async with routed(stub) as (session, url, _):
            stub.gate.clear()
            async with session.post(f"{url}/v1/chat/completions", json={}) as response:
                first = await response.content.readline()
                stub.gate.set()
                return response.headers["Content-Type"], first, await response.content.read()

    kind, first, rest = run(scenario)
    assert kind.startswith("text/event-stream")
    assert first == b"data: first\n" and rest.endswith(b"data: [DONE]\n\n")


def test_admin_calls_reach_every_engine_and_answer_once():
    async def scenario():
        stubs = [Stub("a"), Stub("b")]
        async with routed(*stubs) as (session, url, _):
            async with session.post(f"{url}/pause?mode=keep") as response:
                assert response.status == 200
            body = {"weight_dir": "/w", "version": 3}
            async with session.post(f"{url}/update_weights", json=body) as response:
                return response.status, await response.json(), [stub.asked for stub in stubs]

    status, answer, asked = run(scenario)
    assert status == 200 and answer["fingerprint"] == "full:same"
    assert asked[0] == asked[1]
    assert [path for path, _ in asked[0]] == ["/pause?mode=keep", "/update_weights"]
    assert json.loads(asked[0][1][1]) == {"weight_dir": "/w", "version": 3}


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_engines_with_different_weights_are_a_final_error(odd):
    async def scenario():
        stubs = [Stub(str(n), fingerprint="full:other" if n == odd else "full:same") for n in range(3)]
        async with routed(*stubs) as (session, url, _):
            response = await session.post(f"{url}/update_weights", json={})
            return response.status, (await response.json())["error"]["message"]

    status, message = run(scenario)
    assert status == 409 and "full:other" in message and "full:same" in message


def test_ranks_follow_each_other():
    async def scenario():
        stubs = [Stub("a", workers=2), Stub("b", workers=1), Stub("c", workers=2)]
        async with routed(*stubs) as (session, url, _):
            async with session.get(f"{url}/world_size") as response:
                total = (await response.json())["world_size"]
            body = {"rank_offset": 1, "inference_world_size": total}
            answer = await session.post(f"{url}/init_broadcaster", json=body)
            assert answer.status == 200
            return total, [json.loads(stub.asked[-1][1]) for stub in stubs]

    total, bodies = run(scenario)
    assert total == 5
    assert [body["rank_offset"] for body in bodies] == [1, 3, 4]
    assert {body["inference_world_size"] for body in bodies} == {5}


def test_metrics_of_all_engines_are_told_apart_and_can_be_summed():
    async def scenario():
        async with (
            routed(Stub("a"), Stub("bcd")) as (session, url, _),
            session.get(f"{url}/metrics") as response,
        ):
            return (await response.text()).splitlines()

    lines = run(scenario)
    assert lines.count("# TYPE a gauge") == 1
    assert 'a{model_name="m",engine="0"} 1' in lines and 'a{model_name="m",engine="1"} 3' in lines
    assert 'b{engine="1"} 2.5' in lines


def test_liveness_needs_every_engine():
    async def scenario():
        sick = Stub("b")
        async with routed(Stub("a"), sick) as (session, url, _):
            async with session.get(f"{url}/liveness") as response:
                well = response.status
            sick.health = 503
            async with session.get(f"{url}/liveness") as response:
                return well, response.status

    assert run(scenario) == (200, 503)


def test_a_finished_session_is_forgotten():
    async def scenario():
        async with routed(Stub("a"), Stub("b")) as (session, url, router):
            await ask(session, url, "s")
            assert "s" in router._sessions
            for expected in ("finished", "unknown"):
                async with session.post(f"{url}/finish_session?session_id=s") as response:
                    assert (await response.json())["status"] == expected
            return list(router._sessions)

    assert run(scenario) == []
