"""What is learned, for six chat formats, against texts and masks written by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from sft_models import CHATML, LLAMA, QWEN, learned, make_model

from prl.config.sft import LossMaskConfig
from prl.config.training import ModelConfig
from prl.sft.conversation import Conversation
from prl.sft.tokens import ConversationRenderer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "more"},
    {"role": "assistant", "content": "bye"},
]
SYSTEM = {"role": "system", "content": "be kind"}
THINKING = [
    {"role": "user", "content": "q1"},
    {"role": "assistant", "content": "a1", "reasoning_content": "r1"},
    {"role": "user", "content": "q2"},
    {"role": "assistant", "content": "a2", "reasoning_content": "r2"},
]
WITH_TOOL = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "three"},
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelConfig]:
    def made(name: str, *args: Any, **options: Any) -> ModelConfig:
        return make_model(tmp_path_factory.mktemp(name), *args, **options)

    return {
        "chatml": made("chatml", CHATML, "<|im_end|>", renderer="chatml"),
        "qwen3": made("qwen3", QWEN, "<|im_end|>", renderer="qwen3"),
        "llama-3": made("llama", LLAMA, "<|eot_id|>", renderer="llama-3"),
        "role-token": ModelConfig(name="tiny"),
        "role-token-tools": ModelConfig(name="tiny", renderer="role-token-tools"),
    }


def rendered(
    model: ModelConfig, messages: list[dict], seq_len: int = 9999, **fields: Any
) -> tuple[str, list[str]]:
    """(the whole text, the learned parts of it)."""
    roles = LossMaskConfig(
        **{key: fields.pop(key) for key in ("system", "user", "assistant", "tool") if key in fields}
    )
    renderer = ConversationRenderer(model, roles, seq_len)
    tokens = renderer.render(Conversation(messages, **fields))
    assert len(tokens.token_ids) == len(tokens.mask)
    text = renderer._tokenizer.decode(tokens.token_ids, skip_special_tokens=False)
    return text, learned(renderer._tokenizer, tokens.token_ids, tokens.mask)


def test_chatml(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["chatml"], [SYSTEM, *CHAT])
    assert text == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
        "<|im_start|>assistant\nbye<|im_end|>\n"
    )
    assert parts == ["hello<|im_end|>", "bye<|im_end|>"]


def test_a_system_less_format_of_one_token_a_role(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["role-token"], CHAT)
    assert text == ("<|user|>hi<|end|><|assistant|>hello<|end|><|user|>more<|end|><|assistant|>bye<|end|>")
    assert parts == ["hello<|end|>", "bye<|end|>"]


def test_llama_3_with_the_preamble_that_its_template_always_writes(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["llama-3"], CHAT)
    head = "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: "
    assert text.startswith(head) and text.endswith("bye<|eot_id|>")
    assert parts == ["hello<|eot_id|>", "bye<|eot_id|>"]


def test_qwen3_rewrites_thinking_of_earlier_turns_and_the_mask_follows(
    models: dict[str, ModelConfig],
) -> None:
    text, parts = rendered(models["qwen3"], THINKING)
    assert text == (
        "<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\na1<|im_end|>\n"
        "<|im_start|>user\nq2<|im_end|>\n<|im_start|>assistant\n<think>\nr2\n</think>\n\na2<|im_end|>\n"
    )
    assert parts == ["a1<|im_end|>", "<think>\nr2\n</think>\n\na2<|im_end|>"]


def test_qwen3_learns_the_thinking_of_a_single_turn(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["qwen3"], THINKING[:2])
    assert "r1" in text and parts == ["<think>\nr1\n</think>\n\na1<|im_end|>"]


def test_qwen3_tool_calls_are_learned_and_results_and_schemas_are_not(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["qwen3"], WITH_TOOL, tools=[TOOL])
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'
    assert parts[0].endswith(call) and parts[0].count("<tool_call>") == 1
    assert parts[-1].endswith("three<|im_end|>") and len(parts) == 2
    assert '"name": "add", "parameters"' in text and "<tool_response>\n3\n</tool_response>" in text
    assert not any("tool_response" in part for part in parts)


def test_the_tiny_model_s_own_format_of_tools(models: dict[str, ModelConfig]) -> None:
    text, parts = rendered(models["role-token-tools"], WITH_TOOL, tools=[TOOL])
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><|end|>'
    assert text == (
        '<|system|>tools: [{"type": "function", '
        '"function": {"name": "add", "parameters": {"type": "object"}}}]'
        f"<|end|><|user|>1+2?<|end|><|assistant|>{call}<|tool|>3<|end|><|assistant|>three<|end|>"
    )
    assert parts == [call, "three<|end|>"]


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("chatml", [SYSTEM, *CHAT], {"system": ["be kind"], "user": ["hi", "more"]}),
        ("role-token", CHAT, {"user": ["hi", "more"]}),
        ("llama-3", [SYSTEM, *CHAT], {"system": ["be kind"], "user": ["hi", "more"]}),
        ("qwen3", WITH_TOOL, {"user": ["1+2?"], "tool": ["3"]}),
        ("role-token-tools", WITH_TOOL, {"user": ["1+2?"], "tool": ["3"]}),
    ],
)
def test_other_roles_add_their_content_without_scaffold(
    name: str, messages: list[dict], expected: dict[str, list[str]], models: dict[str, ModelConfig]
) -> None:
    tools = {"tools": [TOOL]} if "tool" in expected else {}
    for role, contents in expected.items():
        assert rendered(models[name], messages, assistant=False, **{role: True}, **tools)[1] == contents
        _, parts = rendered(models[name], messages, **{role: True}, **tools)
        assert all(content in parts for content in contents) and len(parts) == len(contents) + 2


def test_an_end_token_that_is_also_the_padding_stays_learned(tmp_path: Path) -> None:
    model = make_model(tmp_path, CHATML, "<|im_end|>", renderer="chatml", pad="<|im_end|>")
    renderer = ConversationRenderer(model, LossMaskConfig(), 99)
    assert renderer._tokenizer.pad_token_id == renderer._tokenizer.eos_token_id
    tokens = renderer.render(Conversation(CHAT[:2]))
    ends = [
        flag for token, flag in zip(*tokens[:2], strict=True) if token == renderer._tokenizer.eos_token_id
    ]
    assert ends == [False, True]


def test_what_does_not_fit_is_cut_and_told(models: dict[str, ModelConfig]) -> None:
    renderer = ConversationRenderer(models["role-token"], LossMaskConfig(), 7)
    tokens = renderer.render(Conversation(CHAT))
    assert tokens.truncated and len(tokens.token_ids) == 7
    assert tokens.mask == [False] * 5 + [True] * 2  # <|user|> h i <|end|> <|assistant|> | h e
    assert (
        not ConversationRenderer(models["role-token"], LossMaskConfig(), 99)
        .render(Conversation(CHAT))
        .truncated
    )


def test_what_fits_exactly_is_not_cut(models: dict[str, ModelConfig]) -> None:
    whole = ConversationRenderer(models["role-token"], LossMaskConfig(), 99).render(Conversation(CHAT))
    exact = ConversationRenderer(models["role-token"], LossMaskConfig(), len(whole.token_ids))
    assert exact.render(Conversation(CHAT)) == whole and not whole.truncated


def test_a_template_without_an_end_of_the_last_turn_is_given_one(models: dict[str, ModelConfig]) -> None:
    """Some families close an assistant's turn with the opening of the next, and the last one has none."""
    maker = ConversationRenderer(models["role-token"], LossMaskConfig(), 99)
    whole = maker.render(Conversation(CHAT))
    renderer = maker._renderer({})
    render = renderer.render

    def open_ended(*args: Any, **kwargs: Any) -> Any:
        found = render(*args, **kwargs)
        lists = ("token_ids", "message_indices", "sampled_mask", "is_content")
        return dataclasses.replace(found, **{name: getattr(found, name)[:-1] for name in lists})

    renderer.render = open_ended
    assert maker.render(Conversation(CHAT)) == whole and whole.mask[-1]


def test_the_first_token_is_never_learned(models: dict[str, ModelConfig]) -> None:
    renderer = ConversationRenderer(models["role-token"], LossMaskConfig(), 99)
    renderer._renderer({}).prompt_ids = []
    assert renderer.render(Conversation([{"role": "assistant", "content": "ab"}])).mask == [False, True, True]


def test_a_prompt_longer_than_the_row_leaves_nothing_to_learn(models: dict[str, ModelConfig]) -> None:
    tokens = ConversationRenderer(models["role-token"], LossMaskConfig(), 4).render(Conversation(CHAT))
    assert not any(tokens.mask)


def test_options_of_the_renderer_by_row(models: dict[str, ModelConfig]) -> None:
    renderer = ConversationRenderer(models["qwen3"], LossMaskConfig(), 999)
    plain = renderer.render(Conversation(CHAT))
    off = renderer.render(Conversation(CHAT, options={"enable_thinking": False}))
    assert off.token_ids != plain.token_ids
    assert "<think>\n\n</think>" in renderer._tokenizer.decode(off.token_ids, skip_special_tokens=False)
    assert renderer.render(Conversation(CHAT)).token_ids == plain.token_ids
    with pytest.raises(ValueError, match=r"no option reasoning_effort.*columns\.renderer"):
        renderer.render(Conversation(CHAT, options={"reasoning_effort": "high"}))


def test_tools_are_never_left_out_silently(models: dict[str, ModelConfig]) -> None:
    renderer = ConversationRenderer(models["role-token"], LossMaskConfig(), 999)
    with pytest.raises(ValueError, match="role-token-tools"):
        renderer.render(Conversation(WITH_TOOL))
    with pytest.raises(ValueError, match="leaves out"):
        renderer.render(Conversation(CHAT, tools=[TOOL]))


def test_a_renderer_that_cannot_tell_the_roles_is_refused(models: dict[str, ModelConfig]) -> None:
    with pytest.raises(ValueError, match="does not tell which tokens"):
        ConversationRenderer(ModelConfig(name="tiny", renderer="default"), LossMaskConfig(), 99)


def test_what_a_renderer_refuses_is_a_fault_of_the_row(models: dict[str, ModelConfig]) -> None:
    two = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]}]
    with pytest.raises(ValueError, match=r"the renderer refuses it: .*single tool call"):
        rendered(models["llama-3"], two, tools=[TOOL])


def test_calls_of_the_tiny_model_are_read_back() -> None:
    from prl.env.renderers import load_renderer

    renderer = load_renderer(ModelConfig(name="tiny", renderer="role-token-tools"))
    prompt = renderer.render_ids(WITH_TOOL[:1], tools=[TOOL], add_generation_prompt=True)
    whole = renderer.render_ids(WITH_TOOL[:2], tools=[TOOL])
    assert whole[: len(prompt)] == prompt
    parsed = renderer.parse_response(whole[len(prompt) :])
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("add", {"a": 1, "b": 2})]
    assert parsed.content == ""
    broken = renderer.parse_response(renderer.tokenizer.encode("<tool_call>{</tool_call>"))
    assert broken.tool_calls[0].status == "invalid_json"
