"""Tiny random models as Hugging Face directories, and what transformers computes with them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from prl.inference.dense import DenseDecoder
from prl.inference.request import Completion, Request
from prl.inference.sampler import Sampler
from prl.inference.sampling_params import SamplingParams

SPECIALS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
VOCAB = 264
EOS = 7
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
    "attn_implementation": "eager",
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def qwen3(**changes) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 12, "tie_word_embeddings": True, **changes}))


def qwen2(**changes) -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "tie_word_embeddings": False, **changes}))


def llama(**changes) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "tie_word_embeddings": False, **changes}))


FAMILIES = {
    "qwen3": qwen3,
    "qwen3_untied_biased": lambda: qwen3(tie_word_embeddings=False, attention_bias=True),
    "qwen2": qwen2,
    "llama": llama,
    "llama_tied_no_grouping": lambda: llama(num_key_value_heads=4, tie_word_embeddings=True),
    "llama3_rope": lambda: llama(rope_parameters=LLAMA3_ROPE),
    "linear_rope": lambda: llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    ),
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random model whose biases and norms are random too, so that a forgotten one shows."""
    torch.manual_seed(seed)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.2)
    return model


def save(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(SPECIALS + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|bos|>",
        "eos_token": {"__type": "AddedToken", "content": "<|end|>", "special": True},
        "pad_token": "<|pad|>",
        "chat_template": TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def decoder(
    directory: Path, max_length: int = 64, dtype: torch.dtype = torch.float32, **options
) -> DenseDecoder:
    return DenseDecoder.from_directory(
        directory, max_length=max_length, device=torch.device("cpu"), dtype=dtype, **options
    )


def sampler(directory: Path, *, slots: int = 16, max_length: int = 64, seed: int = 0) -> Sampler:
    return Sampler(decoder(directory, max_length), max_slots=slots, seed=seed)


def sample(engine: Sampler, prompts: list[list[int]], **params) -> list[Completion]:
    """Sample one completion of each prompt, all submitted at once."""
    requests = [engine.make_request(prompt, SamplingParams(**params)) for prompt in prompts]
    engine.submit(*requests)
    return drain(engine, requests)


def drain(engine: Sampler, requests: list[Request]) -> list[Completion]:
    """Step until everything has ended; the completions of `requests`."""
    found = {}
    while engine.busy:
        for output in engine.step():
            if output.completion is not None:
                found[output.request] = output.completion
    return [found[request] for request in requests]


@torch.no_grad()
def reference_logprobs(
    model: PreTrainedModel, prompt: list[int], sampled: list[int], temperature: float
) -> list:
    """Log-probabilities of `sampled` after `prompt` from one forward pass of transformers."""
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].double()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()
