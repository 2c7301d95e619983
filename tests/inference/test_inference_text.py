"""Tokenizer, chat templates and incremental text."""

import json
import shutil

import inference_models as lab
import pytest
from transformers import AutoTokenizer

from prl.inference.text import ChatText, TextStream

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "¿Qué tal? ☃"},
    {"role": "assistant", "content": "ok"},
    {"role": "user", "content": "<|end|> is a token"},
]


@pytest.fixture(scope="module")
def text(tiny_dir):
    return ChatText.from_directory(tiny_dir)


def with_template(tiny_dir, tmp_path, template):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_dir / name, tmp_path / name)
    (tmp_path / "chat_template.jinja").write_text(template)
    return ChatText.from_directory(tmp_path)


@pytest.mark.parametrize("generation_prompt", [True, False])
def test_conversations_are_encoded_as_transformers_does(text, tiny_dir, generation_prompt):
    expected = AutoTokenizer.from_pretrained(tiny_dir).apply_chat_template(
        MESSAGES, add_generation_prompt=generation_prompt, return_dict=False
    )
    assert text.encode_chat(MESSAGES, add_generation_prompt=generation_prompt) == expected


def test_a_template_gets_tools_names_and_special_tokens(tiny_dir, tmp_path):
    template = (
        "{{ bos_token }}{{ eos_token }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ mode }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    )
    text = with_template(tiny_dir, tmp_path, template)
    ids = text.encode_chat(MESSAGES, tools=[{"a": "é<"}], template_kwargs={"mode": "fast"})
    assert ids[:2] == [1, 7]
    assert text.decode(ids) == '{"a": "é<"}fastsystem'


def test_tool_calls_and_text_parts_are_made_plain(tiny_dir, tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    template += "{{ c.function.arguments.x + 1 }}{% endfor %}{% endfor %}"
    text = with_template(tiny_dir, tmp_path, template)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 4}'}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
    ]
    assert text.decode(text.encode_chat(messages)) == "abc5"
    assert messages[0]["content"] is parts


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "x"}, "each needs a role"),
        ("x", "each needs a role"),
        ({"role": "user", "content": 4}, "content must be text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "only text parts"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "{"}}]}, "not JSON"),
    ],
)
def test_bad_messages_are_named(text, message, reason):
    with pytest.raises(ValueError, match=reason):
        text.encode_chat([message])


def test_a_template_may_refuse(tiny_dir, tmp_path):
    text = with_template(tiny_dir, tmp_path, "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="roles must alternate"):
        text.encode_chat(MESSAGES)


def test_templates_run_in_a_sandbox(tiny_dir, tmp_path):
    text = with_template(tiny_dir, tmp_path, "{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(ValueError, match="unsafe"):
        text.encode_chat(MESSAGES)


def test_a_broken_template_is_named(tiny_dir, tmp_path):
    with pytest.raises(ValueError, match="does not compile"):
        with_template(tiny_dir, tmp_path, "{% for %}")


def test_named_templates_use_the_default(tiny_dir, tmp_path):
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    named = [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    text = ChatText.from_directory(tmp_path)
    assert text.decode(text.encode_chat(MESSAGES)) == "yes"


def test_what_is_missing_is_said(tiny_dir, tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        ChatText.from_directory(tmp_path)
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="no chat template"):
        ChatText.from_directory(tmp_path).encode_chat(MESSAGES)


def test_special_tokens_are_not_text(text):
    ids = [5, *text.encode("hé"), lab.EOS]
    assert text.decode(ids) == "hé"
    assert text.token_text(lab.EOS) == "<|end|>"


def stream(text, content, stops=()):
    pieces, flow = [], TextStream(text, stops)
    for token in text.encode(content):
        pieces.append(flow.push(token))
        if flow.stopped:
            break
    return [*pieces, flow.finish()], flow.stopped


def test_characters_appear_whole(text):
    pieces, stopped = stream(text, "a☃é")
    assert pieces == ["a", "", "", "☃", "", "é", ""]
    assert not stopped


def test_a_character_cut_short_appears_at_the_end(text):
    flow = TextStream(text)
    ids = text.encode("a☃")
    shown = "".join(flow.push(token) for token in ids[:-1])
    assert shown == "a"
    assert shown + flow.finish() == text.decode(ids[:-1])


def test_nothing_of_a_stop_string_is_shown(text):
    pieces, stopped = stream(text, "abc STOP more", ["STOP"])
    assert "".join(pieces) == "abc "
    assert stopped


def test_what_only_begins_like_a_stop_string_is_shown_in_the_end(text):
    pieces, stopped = stream(text, "say ST", ["STOP"])
    assert pieces[-1] == "ST"
    assert "".join(pieces) == "say ST"
    assert not stopped
    assert "".join(stream(text, "say STEP", ["STOP"])[0]) == "say STEP"


def test_the_first_of_several_stop_strings_counts(text):
    assert "".join(stream(text, "one two three", ["three", "two"])[0]) == "one "
