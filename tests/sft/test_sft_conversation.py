"""Rows become conversations: layouts, columns, and what Arrow and JSON leave behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from prl.config.sft import ColumnsConfig
from prl.sft.conversation import read_row, without_nulls

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}


def messages(row: dict[str, Any], **columns: Any) -> list[dict]:
    return read_row(row, ColumnsConfig(**columns)).messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [USER, ANSWER]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [USER], "completion": [ANSWER]},
        {"prompt": [USER], "completion": "a"},
        {"messages": [USER, ANSWER], "prompt": "other", "completion": "other"},
        {"messages": None, "prompt": "q", "completion": "a"},
        {"messages": json.dumps([USER, ANSWER])},
    ],
)
def test_every_layout_gives_the_same_turns(row: dict) -> None:
    assert messages(row) == [USER, ANSWER]


def test_columns_are_renamed() -> None:
    assert messages({"chat": [USER]}, messages="chat") == [USER]
    assert messages({"q": "q", "r": "a"}, prompt="q", completion="r") == [USER, ANSWER]
    found = read_row({"chat": [USER], "schemas": "[]"}, ColumnsConfig(messages="chat", tools="schemas"))
    assert found.tools is None


def test_options_of_the_renderer_come_from_columns_that_are_not_null() -> None:
    columns = ColumnsConfig(renderer={"reasoning_effort": "effort", "enable_thinking": "think"})
    row = {"messages": [USER], "effort": None, "think": False}
    assert read_row(row, columns).options == {"enable_thinking": False}
    assert read_row({"messages": [USER], "reasoning_effort": "low"}, ColumnsConfig()).options == {
        "reasoning_effort": "low"
    }


def test_nulls_of_arrow_are_dropped_but_not_those_that_a_call_means() -> None:
    row = {
        "messages": [
            {**USER, "name": None, "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": None, "function": {"name": "f", "arguments": {"x": None, "y": [None]}}},
                ],
            },
        ]
    }
    user, answer = messages(row)
    assert user == USER
    assert answer["content"] == ""
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": None, "y": [None]}}}
    assert answer["tool_calls"] == [call]
    assert without_nulls({"a": None, "b": [{"c": None, "d": 0}]}) == {"b": [{"d": 0}]}


def test_a_system_message_without_content_is_none_and_an_empty_one_stays() -> None:
    assert messages({"messages": [{"role": "system", "content": None}, USER]}) == [USER]
    empty = {"role": "system", "content": ""}
    assert messages({"messages": [empty, USER]}) == [empty, USER]


def test_empty_turns_are_turns_without_text() -> None:
    assert messages({"messages": [USER, {"role": "assistant"}]})[1] == {"role": "assistant", "content": ""}
    assert messages({"messages": [USER, {"role": "assistant", "content": "", "tool_calls": []}]})[1] == {
        "role": "assistant",
        "content": "",
    }


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
        [{"name": "f", "arguments": {"x": 1}}],
        [{"type": "function", "function": json.dumps(CALL["function"])}],
    ],
)
def test_tool_calls_as_tables_and_as_text(calls: Any) -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    assert messages({"messages": [turn]})[0]["tool_calls"] == [CALL]


@pytest.mark.parametrize("arguments", [None, "", "{}", "null"])
def test_a_call_without_arguments_has_none(arguments: Any) -> None:
    turn = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}
    assert messages({"messages": [turn]})[0]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("nothing", [None, [], "", " ", "[]", "null"])
def test_columns_of_texts_say_nothing_in_many_ways(nothing: Any) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "a", "tool_calls": nothing}], "tools": nothing}
    found = read_row(row, ColumnsConfig())
    assert found.tools is None and found.messages[1] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    "tools",
    [
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        '[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]',
        [{"name": "f", "parameters": {"type": "object"}, "strict": None}],
        ['{"name": "f", "parameters": {"type": "object"}}'],
    ],
)
def test_tools_as_lists_and_as_text(tools: Any) -> None:
    found = read_row({"messages": [USER], "tools": tools}, ColumnsConfig()).tools
    assert found == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": "x"}, r"neither 'messages' nor 'prompt' with 'completion' \(columns: text\)"),
        ({"prompt": "q"}, "neither"),
        ({}, "columns: none"),
        ({"messages": []}, "no turns"),
        ({"messages": [{"role": "system", "content": None}]}, "no turns"),
        ({"messages": {"role": "user"}}, "'messages' is dict"),
        ({"messages": "hello"}, "messages: not JSON"),
        ({"messages": ["hello"]}, "turn 0 is str"),
        ({"messages": [USER, {"content": "x"}]}, "turn 1 has no role"),
        ({"messages": [{"role": "user", "content": 3}]}, "turn 0: content is int"),
        ({"prompt": 3, "completion": "a"}, "'prompt' is int"),
        ({"messages": [{"role": "assistant", "tool_calls": "{"}]}, "tool_calls of turn 0: not JSON"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "without the name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": "1"}]}]},
            "the arguments of f are no table",
        ),
        ({"messages": [USER], "tools": "{}"}, "tools are dict"),
        ({"messages": [USER], "tools": [{"x": 1}]}, "a tool without the name"),
    ],
)
def test_what_is_wrong_with_a_row_is_said(row: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_row(row, ColumnsConfig())
