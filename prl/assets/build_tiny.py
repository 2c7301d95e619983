"""Files of the bundled model `tiny`, except its weights: a byte tokenizer and a 0.19 M-parameter Qwen3.

`python -m prl.assets.build_tiny [directory]` writes config.json, generation_config.json, tokenizer.json
and tokenizer_config.json. A message is `<|role|>content<|end|>`: one token opens it, one closes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
PAD, BOS, END = 0, 1, 7
MAX_POSITIONS = 2048
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + (m['content'] or '') + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def byte_alphabet() -> list[str]:
    """The 256 characters, sorted, by which byte-level tokenizers spell bytes (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return sorted(map(chr, printable + [0x100 + i for i in range(256 - len(printable))]))


def tokenizer() -> dict[str, Any]:
    """tokenizer.json: byte-level BPE without merges, 264 tokens, the specials first."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": token, **flags} for i, token in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(SPECIALS + byte_alphabet())},
            "merges": [],
        },
    }


def tokenizer_config() -> dict[str, Any]:
    named = {"pad_token": SPECIALS[PAD], "bos_token": SPECIALS[BOS], "eos_token": SPECIALS[END]}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "additional_special_tokens": [token for token in SPECIALS if token not in named.values()],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
    }


def model_config() -> dict[str, Any]:
    """config.json: 2 layers, hidden 96, 4 heads over 2 kv heads of 24, tied embeddings."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(SPECIALS) + 256,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": END,
    }


def generation_config() -> dict[str, Any]:
    return {"do_sample": True, "pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": END}


def build_tiny(directory: Path) -> None:
    """Write the four JSON files into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": model_config(),
        "generation_config.json": generation_config(),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (directory / name).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    build_tiny(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "tiny")
