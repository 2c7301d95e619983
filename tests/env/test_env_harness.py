"""The in-process chat harness against a scripted interception endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import verifiers.v1 as vf
from aiohttp import web
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE

from prl.env import inprocess_chat
from prl.env.inprocess_chat import InprocessChatConfig, InprocessChatHarness, Tools


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inprocess_chat, "RETRY_SECONDS", 0.0)


def reply(content: str | None = "hi", **message: Any) -> web.Response:
    return web.json_response({"choices": [{"message": {"role": "assistant", "content": content, **message}}]})


class Launch:
    """One launch of the harness; `answer` makes the response to the n-th request."""

    def __init__(self, answer: Callable[[int], web.Response | None], **data: Any) -> None:
        self.answer, self.data = answer, vf.TaskData(**data)
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []

    def run(self, **harness: Any) -> vf.ProgramResult:
        return asyncio.run(self._run(InprocessChatHarness(InprocessChatConfig(**harness))))

    async def _run(self, harness: InprocessChatHarness) -> vf.ProgramResult:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._serve)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        endpoint = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        watched: list[Any] = []
        trace = SimpleNamespace(watch=watched.append)
        try:
            return await harness.launch(
                SimpleNamespace(model="m"), trace, None, endpoint, "secret", {}, self.data
            )
        finally:
            assert len(watched) == 1
            await runner.cleanup()

    async def _serve(self, request: web.Request) -> web.Response:
        self.requests.append((dict(request.headers), await request.json()))
        response = self.answer(len(self.requests) - 1)
        if response is None:
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return response

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self.requests[-1][1]["messages"]

    @property
    def retry_counts(self) -> list[str]:
        return [headers["x-stainless-retry-count"] for headers, _ in self.requests]


def test_a_prompt_is_sent_and_answered() -> None:
    launch = Launch(lambda n: reply(), prompt="reverse ab", system_prompt="be brief")
    assert launch.run().exit_code == 0
    ((headers, body),) = launch.requests
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "reverse ab"}],
    }


def test_a_conversation_is_sent_as_it_is() -> None:
    history = [vf.UserMessage(content="a"), vf.AssistantMessage(content="b"), vf.UserMessage(content="c")]
    launch = Launch(lambda n: reply(), prompt=history)
    launch.run()
    assert [(m["role"], m["content"]) for m in launch.messages] == [
        ("user", "a"),
        ("assistant", "b"),
        ("user", "c"),
    ]


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503])
def test_what_may_pass_is_retried_and_says_so(status: int) -> None:
    answers = [web.json_response({}, status=status), web.json_response({}, status=status), reply()]
    launch = Launch(lambda n: answers[n], prompt="x")
    assert launch.run().exit_code == 0
    assert launch.retry_counts == ["0", "1", "2"]
    assert len({str(body) for _, body in launch.requests}) == 1


def test_retries_end() -> None:
    launch = Launch(lambda n: web.json_response({"error": "down"}, status=503), prompt="x")
    result = launch.run()
    assert result.exit_code == 1 and "down" in result.stderr
    assert launch.retry_counts == ["0", "1", "2"]


@pytest.mark.parametrize("status", [400, 401, 404])
def test_a_refusal_is_final(status: int) -> None:
    launch = Launch(
        lambda n: web.json_response({"error": "rollout stopped: max_turns"}, status=status), prompt="x"
    )
    assert launch.run().exit_code == 1
    assert launch.retry_counts == ["0"]


@pytest.mark.parametrize("status", [400, 413])
def test_an_exhausted_context_is_a_clean_end(status: int) -> None:
    message = "Prompt length (9) exceeds maximum context length (8)."
    launch = Launch(lambda n: web.json_response({"error": {"message": message}}, status=status), prompt="x")
    assert launch.run().exit_code == 0


def test_a_lost_connection_is_told_from_a_refusal() -> None:
    launch = Launch(lambda n: None, prompt="x")
    assert launch.run().exit_code == MODEL_TRANSPORT_ERROR_EXIT_CODE
    assert len(launch.requests) == 3


def call(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_tool_calls_are_answered_until_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call_mcp(servers: Any, dispatch: Any, name: str, arguments: dict[str, int]) -> str:
        return str(arguments["a"] + arguments["b"])

    schema = {"type": "function", "function": {"name": "calc_add"}}

    async def connect(urls: dict[str, str], patience: float, stack: AsyncExitStack) -> Tools:
        return Tools(
            [{"type": "function", "function": {"name": "calc_add"}}], {"calc_add": ("calc", "add")}, {}
        )

    monkeypatch.setattr(inprocess_chat, "call_mcp", call_mcp)
    monkeypatch.setattr(Tools, "connect", connect)
    calls = [
        call("calc_add", '{"a": 1, "b": 2}', "c1"),
        call("calc_add", "not json", "c2"),
        call("nope", "{}", "c3"),
        call("calc_add", "{}", "c4"),
    ]
    answers = [reply(None, tool_calls=calls), reply("3")]
    launch = Launch(lambda n: answers[n], prompt="1 plus 2")
    assert launch.run().exit_code == 0
    assert launch.requests[0][1]["tools"] == [schema]
    results = [m for m in launch.messages if m["role"] == "tool"]
    assert [m["tool_call_id"] for m in results] == ["c1", "c2", "c3", "c4"]
    assert results[0]["content"] == "3"
    assert results[1]["content"].startswith("error: Expecting value")
    assert results[2]["content"] == "error: unknown tool 'nope'"
    assert results[3]["content"] == "error: 'a'"
