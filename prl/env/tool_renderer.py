"""`role-token` with tools: for models of that chat format that are taught to call functions.

Schemas stand in a system message before the others. A call is
`<tool_call>{"name": …, "arguments": …}</tool_call>` in the assistant's turn, a result is a message of role
`tool`. Without tools it equals `role-token`.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal

from renderers import BaseRendererConfig, ParsedResponse, RenderedTokens
from renderers.base import ParsedToolCall, ToolCallParseStatus

from prl.env.delimited_renderer import Message
from prl.env.role_token_renderer import RoleTokenRenderer

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
HEADER = "tools: "


class RoleTokenToolsConfig(BaseRendererConfig):
    """No options."""

    name: Literal["role-token-tools"] = "role-token-tools"


class RoleTokenToolsRenderer(RoleTokenRenderer):
    """One token opens a message, one closes it; calls and schemas are JSON in their content."""

    config_class: ClassVar[type[BaseRendererConfig]] = RoleTokenToolsConfig
    supports_tools = True

    def render(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        """As without tools, after a system message with the schemas if there are any."""
        rendered = super().render(
            [with_calls(message) for message in messages], add_generation_prompt=add_generation_prompt
        )
        if not tools:
            return rendered
        head = super().render([{"role": "system", "content": HEADER + json.dumps(tools, ensure_ascii=False)}])
        size = len(head.token_ids)
        rendered.token_ids[:0] = head.token_ids
        rendered.message_indices[:0] = [-1] * size
        rendered.sampled_mask[:0] = [False] * size
        rendered.is_content[:0] = [False] * size
        return rendered

    def render_ids(
        self, messages: list[Message], *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt).token_ids

    def parse_response(
        self, token_ids: list[int], *, tools: Any = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        """Text outside of calls, and the calls; one that is not JSON has the status INVALID_JSON."""
        text = super().parse_response(token_ids).content
        parsed = ParsedResponse(content=CALL.sub("", text).strip())
        parsed.tool_calls = [_parse(raw) for raw in CALL.findall(text)]
        return parsed


def with_calls(message: Message) -> Message:
    """The message with its tool calls written into its content."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    texts = [f"<tool_call>{json.dumps(_call(call), ensure_ascii=False)}</tool_call>" for call in calls]
    return {**message, "content": (message.get("content") or "") + "".join(texts)}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments", {})
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"name": function["name"], "arguments": arguments}


def _parse(raw: str) -> ParsedToolCall:
    try:
        call = json.loads(raw)
        return ParsedToolCall(raw=raw, name=call["name"], arguments=call["arguments"])
    except (ValueError, KeyError, TypeError):
        return ParsedToolCall(raw=raw, status=ToolCallParseStatus.INVALID_JSON)
