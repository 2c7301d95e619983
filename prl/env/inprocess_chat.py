"""Harness `inprocess-chat`: the chat loop runs inside the environment worker's event loop.

The contract of verifiers' `null` harness (chat completions, MCP tools, no code execution) without a program
per rollout. Every model call goes through the interception endpoint, so limits, stop hooks, the message
graph and token capture all apply.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import MODEL_TRANSPORT_ERROR_EXIT_CODE
from verifiers.v1.harnesses.utils.mcp import MCPConnection, call_mcp, connect_mcp

from prl.env.overflow import is_overflow

HARNESS_ID = "inprocess-chat"
RETRIES = 2
RETRY_SECONDS = 0.5
RETRY_STATUS = (408, 409, 429)


class InprocessChatConfig(vf.HarnessConfig):
    """No options of its own."""

    id: str = HARNESS_ID


class InprocessChatHarness(vf.Harness[InprocessChatConfig]):
    """One seat's program: prompt, reply, tool calls, until the model stops calling tools."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        """Run the chat to its end. Exit code 0 also when the context is exhausted: that is a limit."""
        trace.watch(_ignore)  # a stream of partial traces would cost more than the rollout; nobody reads it
        system, prompt = self.resolve_prompt(data)
        async with AsyncExitStack() as stack:
            tools = await Tools.connect(mcp_urls, self.config.tool_timeout, stack)
            http = await stack.enter_async_context(_session(secret))
            chat = Chat(http, f"{endpoint}/chat/completions", ctx.model, _opening(system, prompt), tools)
            return await chat.run()


class Tools:
    """The task's MCP servers, as the model sees them."""

    def __init__(
        self,
        schemas: list[dict[str, Any]],
        dispatch: dict[str, tuple[str, str]],
        servers: dict[str, MCPConnection],
    ) -> None:
        self.schemas, self.dispatch, self.servers = schemas, dispatch, servers

    @classmethod
    async def connect(cls, urls: dict[str, str], patience: float, stack: AsyncExitStack) -> Tools:
        if not urls:
            return cls([], {}, {})
        servers = {name: {"url": url, "timeout": patience} for name, url in urls.items()}
        return cls(*await connect_mcp({"mcpServers": servers}, stack))

    async def call(self, call: dict[str, Any]) -> dict[str, Any]:
        """The tool message that answers `call`. Failures are the model's to read."""
        name = call["function"]["name"]
        message = {"role": "tool", "tool_call_id": call["id"], "name": name}
        if name not in self.dispatch:
            return {**message, "content": f"error: unknown tool {name!r}"}
        try:
            arguments = json.loads(call["function"]["arguments"] or "{}")
            content = await call_mcp(self.servers, self.dispatch, name, arguments)
        except Exception as error:
            content = f"error: {error}"
        return {**message, "content": content}


class Chat:
    """The loop over turns of one segment."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        url: str,
        model: str,
        messages: list[dict[str, Any]],
        tools: Tools,
    ) -> None:
        self.http, self.url, self.tools = http, url, tools
        self.body: dict[str, Any] = {"model": model, "messages": messages}
        if tools.schemas:
            self.body["tools"] = tools.schemas

    async def run(self) -> vf.ProgramResult:
        while True:
            status, payload = await self._post()
            if status == 0:
                return vf.ProgramResult(MODEL_TRANSPORT_ERROR_EXIT_CODE, "", payload)
            if status != 200:
                overflow = status in (400, 413) and is_overflow(payload)
                return vf.ProgramResult(0 if overflow else 1, "", payload[:2000])
            message = json.loads(payload)["choices"][0]["message"]
            self.body["messages"].append(message)
            if not (calls := message.get("tool_calls")):
                return vf.ProgramResult(0, "", "")
            for call in calls:
                self.body["messages"].append(await self.tools.call(call))

    async def _post(self) -> tuple[int, str]:
        """(HTTP status, text) of one turn; status 0 = no answer. Retries what may pass by itself.

        The retry header lets the server replay a turn that it has already recorded, so that no turn is
        sampled twice.
        """
        body = json.dumps(self.body).encode()
        attempt = 0
        while True:
            status, text = await self._attempt(body, attempt)
            passing = status == 0 or status >= 500 or status in RETRY_STATUS
            if not passing or attempt == RETRIES:
                return status, text
            await asyncio.sleep(RETRY_SECONDS * 2**attempt)
            attempt += 1

    async def _attempt(self, body: bytes, attempt: int) -> tuple[int, str]:
        headers = {"x-stainless-retry-count": str(attempt)}
        try:
            async with self.http.post(self.url, data=body, headers=headers) as response:
                return response.status, await response.text()
        except aiohttp.ClientError as error:
            return 0, repr(error)


def _opening(system: str | None, prompt: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    if isinstance(prompt, str):
        return [*messages, {"role": "user", "content": prompt}]
    return [*messages, *(message_to_wire(message) for message in prompt or [])]


def _ignore(trace: vf.Trace) -> None:
    """The finished trace is sent whole when its episode ends."""


def _session(secret: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        timeout=aiohttp.ClientTimeout(total=None),
    )


__all__ = ["InprocessChatHarness"]
