"""A row of a data set as a conversation: which columns count, and what Arrow and JSON added is cleaned away.

Arrow gives every row the union of all keys, with null where a row had none: nulls are dropped everywhere but
inside the arguments of tool calls, where a null may be meant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prl.config.sft import ColumnsConfig

Turn = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Turns, function schemas, and options of the renderer for this row alone."""

    messages: list[Turn]
    tools: list[dict[str, Any]] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def read_row(row: Mapping[str, Any], columns: ColumnsConfig) -> Conversation:
    """The conversation of one row. Raises ValueError saying what is wrong with the row."""
    options = {name: row[column] for name, column in columns.renderer.items() if row.get(column) is not None}
    return Conversation(_messages(row, columns), _tools(row.get(columns.tools)), options)


def _messages(row: Mapping[str, Any], columns: ColumnsConfig) -> list[Turn]:
    turns = row.get(columns.messages)
    if turns is None:
        prompt, completion = row.get(columns.prompt), row.get(columns.completion)
        if prompt is None or completion is None:
            raise ValueError(
                f"it has neither {columns.messages!r} nor {columns.prompt!r} with {columns.completion!r} "
                f"(columns: {', '.join(map(str, row)) or 'none'}); set data.columns"
            )
        turns = [*_side(prompt, "user", columns.prompt), *_side(completion, "assistant", columns.completion)]
    turns = _parsed(turns, columns.messages)
    if not isinstance(turns, list):
        raise ValueError(f"{columns.messages!r} is {type(turns).__name__}, a list of turns is needed")
    cleaned = [turn for number, raw in enumerate(turns) if (turn := _turn(raw, number)) is not None]
    if not cleaned:
        raise ValueError("it has no turns")
    return cleaned


def _side(value: Any, role: str, column: str) -> list[Any]:
    """Prompt or completion as turns: a text is one turn of `role`."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list):
        raise ValueError(f"{column!r} is {type(value).__name__}, text or a list of turns is needed")
    return value


def _turn(raw: Any, number: int) -> Turn | None:
    """One cleaned turn; None for a system message without content, which says nothing."""
    if not isinstance(raw, Mapping):
        raise ValueError(f"turn {number} is {type(raw).__name__}, a table with role and content is needed")
    calls = raw.get("tool_calls")
    turn = without_nulls({key: value for key, value in raw.items() if key != "tool_calls"})
    role = turn.get("role")
    if not isinstance(role, str) or not role:
        raise ValueError(f"turn {number} has no role")
    if role == "system" and "content" not in turn:
        return None
    turn.setdefault("content", "")
    if not isinstance(turn["content"], str | list):
        found = type(turn["content"]).__name__
        raise ValueError(f"turn {number}: content is {found}, text or a list of parts is needed")
    if calls is not None:
        parsed = _parsed(calls, f"tool_calls of turn {number}")
        if parsed is not None and not isinstance(parsed, list):
            raise ValueError(f"turn {number}: tool_calls is {type(parsed).__name__}, a list is needed")
        if parsed:
            turn["tool_calls"] = [_call(call, number) for call in parsed]
    return turn


def _call(raw: Any, number: int) -> dict[str, Any]:
    """A tool call as `{"type": "function", "function": {"name", "arguments": table}, ...}`."""
    call = _parsed(raw, f"a tool call of turn {number}")
    function = call.get("function", call) if isinstance(call, Mapping) else None
    function = _parsed(function, f"a tool call of turn {number}")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(f"turn {number}: a tool call without the name of its function")
    arguments = _parsed(function.get("arguments"), f"arguments of a tool call of turn {number}")
    arguments = {} if arguments is None else arguments
    if not isinstance(arguments, Mapping):
        raise ValueError(f"turn {number}: the arguments of {function['name']} are no table")
    around = {key: value for key, value in call.items() if key not in ("function", "name", "arguments")}
    return {
        "type": "function",
        **without_nulls(around),
        "function": {"name": function["name"], "arguments": dict(arguments)},
    }


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Function schemas in OpenAI's shape; None without any."""
    parsed = _parsed(value, "tools")
    if parsed is None:
        return None
    if not isinstance(parsed, list):
        raise ValueError(f"tools are {type(parsed).__name__}, a list of function schemas is needed")
    return [_tool(without_nulls(_parsed(tool, "a tool"))) for tool in parsed] or None


def _tool(tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or "name" not in tool.get("function", tool):
        raise ValueError("a tool without the name of its function")
    return tool if "function" in tool else {"type": "function", "function": tool}


def without_nulls(value: Any) -> Any:
    """`value` without the keys of tables that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [without_nulls(entry) for entry in value]
    return value


def _parsed(value: Any, what: str) -> Any:
    """`value`, read as JSON where it is text. Blank text says nothing, as null does: a column of texts has
    no other way to say it."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return json.loads(value)
    except ValueError as error:
        raise ValueError(f"{what}: not JSON ({error})") from error
