"""Small tokenizers in the manner of several families: bytes, and the special tokens of the family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.assets import bundled_model
from prl.config.training import ModelConfig

CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
QWEN = [
    *CHATML,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]
LLAMA = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
]


def make_model(
    directory: Path, specials: list[str], eos: str, *, renderer: str, pad: str | None = None
) -> ModelConfig:
    """A model directory without weights: a byte tokenizer whose specials are `specials`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=eos, pad_token=pad or eos)
    tokenizer.save_pretrained(directory)
    config = json.loads((bundled_model("tiny") / "config.json").read_text())
    config["vocab_size"] = len(letters) + len(specials)
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig(name="small", path=str(directory), renderer=renderer)


def learned(tokenizer: Any, token_ids: list[int], mask: list[bool]) -> list[str]:
    """The text of every unbroken run of learned tokens."""
    runs: list[list[int]] = []
    before = False
    for token, flag in zip(token_ids, mask, strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]
