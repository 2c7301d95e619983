"""The bundled model: its files are what the builder writes, and the tokenizer is what the contract says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prl.assets import build_tiny, bundled_model, bundled_models
from prl.env.renderers import policy_tokenizer

TINY = bundled_model("tiny")


@pytest.mark.parametrize(
    "name", ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
)
def test_files_are_current(name: str, tmp_path: Path) -> None:
    build_tiny.build_tiny(tmp_path)
    assert (TINY / name).read_text(encoding="utf-8") == (tmp_path / name).read_text(encoding="utf-8")


def test_unknown_model_names_what_there_is() -> None:
    assert bundled_models() == ["tiny", "tiny_teacher"]
    with pytest.raises(ValueError, match="no bundled model 'huge'; prl ships: tiny, tiny_teacher"):
        bundled_model("huge")


def test_the_alphabet_spells_every_byte_once() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    assert build_tiny.byte_alphabet() == sorted(ByteLevel.alphabet())


def test_specials_come_first_and_every_text_round_trips() -> None:
    tokenizer = policy_tokenizer(TINY)
    assert len(tokenizer) == 264
    assert tokenizer.convert_tokens_to_ids(build_tiny.SPECIALS) == list(range(8))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 7)
    text = "tabs\t and  spaces\n, ümlaut, 漢字, 🂡"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == len(text.encode())
    assert min(ids) >= 8
    assert tokenizer.decode(ids) == text


def test_the_fast_path_gives_what_auto_tokenizer_gives() -> None:
    from transformers import AutoTokenizer

    ours, auto = policy_tokenizer(TINY), AutoTokenizer.from_pretrained(TINY)
    assert type(ours) is type(auto)
    assert ours.get_vocab() == auto.get_vocab()
    assert ours.chat_template == auto.chat_template
    assert ours.backend_tokenizer.to_str() == auto.backend_tokenizer.to_str()


def test_chat_template_writes_one_token_around_each_message() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "t"},
    ]
    text = policy_tokenizer(TINY).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>s<|end|><|user|>u<|end|><|assistant|><|end|><|tool|>t<|end|><|assistant|>"


def test_weights_fit_the_config() -> None:
    from transformers import Qwen3ForCausalLM

    model, report = Qwen3ForCausalLM.from_pretrained(TINY, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 191_808
    assert (TINY / "model.safetensors").stat().st_size < 1_000_000
    config = json.loads((TINY / "config.json").read_text())
    shape = {key: getattr(model.config, key) for key in ("hidden_size", "num_hidden_layers", "head_dim")}
    assert shape == {"hidden_size": 96, "num_hidden_layers": 2, "head_dim": 24}
    assert model.config.rope_parameters["rope_theta"] == config["rope_theta"] == 10000.0
    assert model.config.tie_word_embeddings
