"""Data made on the fly: the tiny model's warm start, and tokens without meaning."""

from __future__ import annotations

import json
import random
import string
from typing import NamedTuple

from prl.config.sft import FakeDataConfig, WarmStartDataConfig
from prl.config.training import ModelConfig
from prl.sft.conversation import Conversation
from prl.sft.tokens import Tokens

MIN_LETTERS, MAX_LETTERS = 3, 8


class Example(NamedTuple):
    """One question and the answer to learn."""

    prompt: str
    answer: str


class WarmStart:
    """Words to reverse and one-digit sums; some answers stand in brackets, which is what RL then rewards.

    `reverse abc` is answered by `cba` or `[cba]`, `add 3+4` by `7` or `[7]`. Batches are drawn whole, each
    from seed and step, and read one by one.
    """

    def __init__(self, config: WarmStartDataConfig, seed: int) -> None:
        self._config = config
        self._seed = seed
        self._step, self._batch = 0, list[Example]()

    def conversation(self, index: int) -> Conversation:
        """Sample `index` (from 0)."""
        step, place = divmod(index, self._config.batch_size)
        if step + 1 != self._step:
            self._step, self._batch = step + 1, self.batch(step + 1)
        example = self._batch[place]
        question = {"role": "user", "content": example.prompt}
        return Conversation([question, {"role": "assistant", "content": example.answer}])

    def batch(self, step: int) -> list[Example]:
        """The examples of `step` (from 1)."""
        generator = random.Random(f"{self._seed}/{step}")
        return [self._example(generator) for _ in range(self._config.batch_size)]

    def _example(self, generator: random.Random) -> Example:
        if generator.random() < self._config.arithmetic_share:
            a, b = generator.randrange(10), generator.randrange(10)
            prompt, answer = f"add {a}+{b}", str(a + b)
        else:
            length = generator.randint(MIN_LETTERS, MAX_LETTERS)
            word = "".join(generator.choices(string.ascii_lowercase, k=length))
            prompt, answer = f"reverse {word}", word[::-1]
        return Example(prompt, f"[{answer}]" if generator.random() < self._config.format_share else answer)


class FakeDocuments:
    """Ids below the model's vocabulary, all of them learned."""

    def __init__(self, config: FakeDataConfig, model: ModelConfig, seq_len: int, seed: int) -> None:
        from prl.model_path import resolve_model_path

        settings = json.loads((resolve_model_path(model) / "config.json").read_text())
        self._vocabulary = int((settings.get("text_config") or settings)["vocab_size"])
        self._config, self._seq_len, self._seed = config, seq_len, seed

    def tokens(self, index: int) -> Tokens:
        """Tokens of sample `index`."""
        draw = random.Random(f"{self._seed}/{index}")
        size = self._seq_len if self._config.length == "fixed" else draw.randint(2, self._seq_len)
        if self._config.tokens == "increasing":
            ids = [(index + i) % self._vocabulary for i in range(size)]
        else:
            ids = draw.choices(range(self._vocabulary), k=size)
        return Tokens(ids, [i > 0 for i in range(size)])
