"""Renderers: parity with chat templates, masks, bridging, and the choice by `model.renderer`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from renderers import build_training_sample, create_renderer
from renderers.configs import CustomRendererConfig, DefaultRendererConfig, Qwen3RendererConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from prl.assets import bundled_model
from prl.config.rules_training import RENDERERS
from prl.config.training import ModelConfig
from prl.env.chatml_renderer import ChatMLRenderer
from prl.env.renderers import load_renderer, parity_gap, policy_tokenizer, renderer_config, renderer_names
from prl.env.role_token_renderer import RoleTokenRenderer

CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WORDS = ["ab", "\n\nline", " lead", "trail ", "ümlaut", "", "x" * 20, "<b>", "1 + 2\n"]
CONVERSATION = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "reverse ab"},
    {"role": "assistant", "content": "[ba]"},
    {"role": "tool", "content": "ok"},
    {"role": "user", "content": "reverse cd"},
]


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE with merges, so that text may merge over the borders of messages."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=specials, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(["user\n\nassistant\nreverse the line", "system\nbe brief\n\n"] * 20, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="module", params=["role-token", "chatml"])
def renderer(request: pytest.FixtureRequest) -> Any:
    if request.param == "role-token":
        return RoleTokenRenderer(policy_tokenizer(bundled_model("tiny")))
    return ChatMLRenderer(chatml_tokenizer())


def template_ids(renderer: Any, messages: list[dict[str, str]], prompt: bool) -> list[int]:
    return renderer.tokenizer.apply_chat_template(messages, add_generation_prompt=prompt, return_dict=False)


@pytest.mark.parametrize("prompt", [True, False])
def test_renders_what_the_chat_template_renders(renderer: Any, prompt: bool) -> None:
    rng = random.Random(1)
    for _ in range(50):
        roles = rng.choices(["system", "user", "assistant", "tool"], k=rng.randint(1, 5))
        messages = [{"role": role, "content": rng.choice(WORDS)} for role in roles]
        rendered = renderer.render(messages, add_generation_prompt=prompt)
        text = renderer.tokenizer.decode(rendered.token_ids)
        assert text == renderer.tokenizer.decode(template_ids(renderer, messages, prompt))
        if not any(m["role"] == "assistant" and m["content"][:1] == "\n" for m in messages):
            assert rendered.token_ids == template_ids(renderer, messages, prompt)
        assert renderer.render_ids(messages, add_generation_prompt=prompt) == rendered.token_ids


def test_masks_tell_bodies_and_sampled_tokens_from_scaffold(renderer: Any) -> None:
    rendered = renderer.render(CONVERSATION, add_generation_prompt=True)
    n = len(rendered.token_ids)
    assert len(rendered.sampled_mask) == len(rendered.is_content) == len(rendered.message_indices) == n
    for index, message in enumerate(CONVERSATION):
        mine = [k for k in range(n) if rendered.message_indices[k] == index]
        body = [rendered.token_ids[k] for k in mine if rendered.is_content[k]]
        sampled = [rendered.token_ids[k] for k in mine if rendered.sampled_mask[k]]
        if message["role"] == "assistant":
            assert body == sampled
            assert renderer.tokenizer.decode(body) == message["content"] + renderer.close
        else:
            assert renderer.tokenizer.decode(body) == message["content"]
            assert sampled == []
    assert rendered.message_roles == [message["role"] for message in CONVERSATION]
    tail = [k for k in range(n) if rendered.message_indices[k] == -1]
    assert [rendered.token_ids[k] for k in tail] == renderer.prompt_ids


def test_sft_trains_the_reply_and_its_end_only(renderer: Any) -> None:
    sample = build_training_sample(renderer, CONVERSATION)
    trained = [token for token, on in zip(sample.token_ids, sample.loss_mask, strict=True) if on]
    assert renderer.tokenizer.decode(trained) == "[ba]" + renderer.close


def test_bridge_extends_the_exact_tokens(renderer: Any) -> None:
    prompt = renderer.render_ids(CONVERSATION[:2], add_generation_prompt=True)
    sampled = [*renderer.tokenizer.encode("[b", add_special_tokens=False), renderer.close_id]
    new = [{"role": "user", "content": "reverse xy"}]
    bridged = renderer.bridge_to_next_turn(prompt, sampled, new)
    assert bridged.token_ids[: len(prompt) + len(sampled)] == prompt + sampled
    history = [*CONVERSATION[:2], {"role": "assistant", "content": "[b"}, *new]
    assert bridged.token_ids == template_ids(renderer, history, True)
    before = len(prompt) + len(sampled)
    assert set(bridged.message_indices[:before]) == {-1}
    assert not any(bridged.sampled_mask) and not any(bridged.is_content[:before])
    body = [t for t, content in zip(bridged.token_ids, bridged.is_content, strict=True) if content]
    assert renderer.tokenizer.decode(body) == "reverse xy"


def test_bridge_closes_a_turn_that_was_cut(renderer: Any) -> None:
    prompt = renderer.render_ids(CONVERSATION[:2], add_generation_prompt=True)
    sampled = renderer.tokenizer.encode("[b", add_special_tokens=False)
    bridged = renderer.bridge_to_next_turn(prompt, sampled, [{"role": "user", "content": "go on"}])
    after = len(prompt) + len(sampled)
    assert bridged.token_ids[:after] == prompt + sampled
    assert bridged.token_ids[after] == renderer.close_id


@pytest.mark.parametrize("new", [[], [{"role": "assistant", "content": "x"}]])
def test_bridge_refuses_what_it_cannot_extend(renderer: Any, new: list[dict[str, str]]) -> None:
    assert renderer.bridge_to_next_turn([1], [2], new) is None
    assert renderer.bridge_to_next_turn([], [2], [{"role": "user", "content": "x"}]) is None


def test_parsing_stops_at_the_close_and_strips_specials(renderer: Any) -> None:
    ids = renderer.tokenizer.encode("[ba]", add_special_tokens=False)
    noise = renderer.render_ids([{"role": "user", "content": ""}])[0]
    parsed = renderer.parse_response([noise, *ids, noise, renderer.close_id, *ids])
    assert parsed.content == "[ba]"
    assert parsed.tool_calls == []
    assert renderer.parse_response([renderer.close_id]).content == ""


def test_stop_tokens_end_a_turn(renderer: Any) -> None:
    assert renderer.get_stop_token_ids()[0] == renderer.close_id
    assert renderer.tokenizer.eos_token_id in renderer.get_stop_token_ids()


def test_text_parts_are_joined_and_media_refused(renderer: Any) -> None:
    parts = [{"type": "text", "text": "re"}, {"type": "text", "text": "verse"}]
    assert renderer.render_ids([{"role": "user", "content": parts}]) == renderer.render_ids(
        [{"role": "user", "content": "reverse"}]
    )
    with pytest.raises(ValueError, match="takes text only, got content of type image_url"):
        renderer.render_ids([{"role": "user", "content": [{"type": "image_url"}]}])


def test_a_tokenizer_without_the_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ChatMLRenderer needs '<\|im_end\|>' as one token"):
        ChatMLRenderer(policy_tokenizer(bundled_model("tiny")))


def tiny(renderer: str = "auto", path: Path | None = None, name: str = "tiny") -> ModelConfig:
    return ModelConfig(name=name, path=str(path) if path else None, renderer=renderer)


def local_model(directory: Path, template: str | None) -> Path:
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def test_auto_knows_the_bundled_model_and_its_offspring(tmp_path: Path) -> None:
    assert isinstance(load_renderer(tiny()), RoleTokenRenderer)
    copy = local_model(tmp_path, policy_tokenizer(bundled_model("tiny")).chat_template)
    assert renderer_config(tiny(path=copy, name="mine")).import_path.endswith("RoleTokenRenderer")


def test_auto_finds_a_template_in_its_own_file(tmp_path: Path) -> None:
    copy = local_model(tmp_path, None)
    (copy / "chat_template.jinja").write_text(policy_tokenizer(bundled_model("tiny")).chat_template)
    assert renderer_config(tiny(path=copy, name="mine")).import_path.endswith("RoleTokenRenderer")


def test_auto_takes_an_exact_hugging_face_id(tmp_path: Path) -> None:
    config = renderer_config(tiny(path=local_model(tmp_path, CHATML), name="Qwen/Qwen3-0.6B"))
    assert isinstance(config, Qwen3RendererConfig)


def test_auto_refuses_to_guess(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"auto knows no renderer for model 'mine'.*role-token, role-token-tools, chatml"
    ):
        renderer_config(tiny(path=local_model(tmp_path, CHATML), name="mine"))


def test_named_renderers() -> None:
    assert isinstance(renderer_config(tiny("qwen3")), Qwen3RendererConfig)
    assert isinstance(renderer_config(tiny("default")), DefaultRendererConfig)
    assert renderer_config(tiny("chatml")).import_path.endswith("ChatMLRenderer")
    custom = renderer_config(tiny("prl.env.role_token_renderer:RoleTokenRenderer"))
    assert isinstance(custom, CustomRendererConfig)
    tokenizer = policy_tokenizer(bundled_model("tiny"))
    assert isinstance(create_renderer(tokenizer, custom), RoleTokenRenderer)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen_3", "did you mean 'qwen3'"),
        ("nope.module:Renderer", "there is no module 'nope'"),
        ("prl.env.overflow:is_overflow", "not a renderer class"),
    ],
)
def test_bad_names_are_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        renderer_config(tiny(name))


def test_parity_gap_shows_both_renderings() -> None:
    renderer = ChatMLRenderer(chatml_tokenizer())
    assert parity_gap(renderer, renderer.tokenizer) is None
    other = chatml_tokenizer()
    other.chat_template = "<|im_start|>system\nhi<|im_end|>\n" + CHATML
    assert "system\nhi" in (parity_gap(renderer, other) or "").replace("\\n", "\n")


def test_the_names_that_are_checked_early_are_those_there_are() -> None:
    assert sorted(RENDERERS) == sorted(renderer_names())
