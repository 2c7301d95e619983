"""The bundled teacher: the recorded file, the tokenizer of the policy, and better than the policy."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path

import prl.assets
from prl.assets import bundled_model, bundled_models

TEACHER, POLICY = bundled_model("tiny_teacher"), bundled_model("tiny")


def test_it_is_the_recorded_file() -> None:
    digest = hashlib.sha256((TEACHER / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (prl.assets.__doc__ or "")
    assert "run.name=teacher env=[reverse_text,arithmetic] max_steps=60 seed=0 ckpt=end" in prl.assets.__doc__
    assert sum(file.stat().st_size for file in TEACHER.iterdir()) < 1_000_000
    assert {"tiny", "tiny_teacher"} <= set(bundled_models())


def test_it_speaks_the_tokens_of_the_policy_and_is_another_network() -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (TEACHER / name).read_text() == (POLICY / name).read_text(), name
    assert (TEACHER / "model.safetensors").read_bytes() != (POLICY / "model.safetensors").read_bytes()


def bracketed_share(directory: Path, words: list[str]) -> tuple[float, float]:
    """(probability of opening with a bracket, greedy answers that are right), means over `words`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    opening, right = 0.0, 0
    bracket = tokenizer.encode("[", add_special_tokens=False)[0]
    for word in words:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": f"reverse {word}"}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )
        with torch.no_grad():
            opening += model(prompt).logits[0, -1].softmax(-1)[bracket].item()
            reply = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        right += tokenizer.decode(reply, skip_special_tokens=True) == f"[{word[::-1]}]"
    return opening / len(words), right / len(words)


def test_it_does_what_the_policy_shall_learn() -> None:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=4)) for _ in range(24)]
    opening, right = bracketed_share(TEACHER, words)
    assert opening > 0.9 and right > 0.5
    assert bracketed_share(POLICY, words)[0] < 0.5
