"""Training data of `prl sft`: tokens of a conversation, with the loss on what the assistant says."""

from __future__ import annotations

import random
import string
from typing import Any, NamedTuple, Protocol

from prl.config.schema import SftDataConfig, WarmStartDataConfig
from prl.records import TrainSample

MIN_LETTERS, MAX_LETTERS = 3, 8


class Example(NamedTuple):
    """One question and the answer to learn."""

    prompt: str
    answer: str


class Dataset(Protocol):
    """Batches as a pure function of the step, so that a resumed run continues in the same place."""

    def batch(self, step: int) -> list[Example]: ...


class WarmStart:
    """Words to reverse and one-digit sums; some answers stand in brackets, which is what RL then rewards.

    `reverse abc` is answered by `cba` or `[cba]`, `add 3+4` by `7` or `[7]`.
    """

    def __init__(self, config: WarmStartDataConfig, seed: int) -> None:
        self._config = config
        self._seed = seed

    def batch(self, step: int) -> list[Example]:
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


def build_dataset(config: SftDataConfig, seed: int) -> Dataset:
    """The dataset of `config.name`. Raises ValueError for one that prl does not have."""
    if isinstance(config, WarmStartDataConfig):
        return WarmStart(config, seed)
    raise ValueError(f"data.name={config.name}: prl has warm_start")


def render(example: Example, tokenizer: Any, env: str) -> TrainSample:
    """Tokens of the conversation by the tokenizer's chat template, cross-entropy on the answer and its end.

    Raises ValueError if the template does not continue the prompt verbatim.
    """
    question = {"role": "user", "content": example.prompt}
    prompt = _tokens(tokenizer, [question], add_generation_prompt=True)
    tokens = _tokens(tokenizer, [question, {"role": "assistant", "content": example.answer}])
    if tokens[: len(prompt)] != prompt:
        raise ValueError(
            "the chat template rewrites the prompt once there is an answer; it cannot be trained on"
        )
    if tokenizer.eos_token_id in tokens[len(prompt) :]:
        tokens = tokens[: tokens.index(tokenizer.eos_token_id, len(prompt)) + 1]
    mask = [position >= len(prompt) for position in range(len(tokens))]
    return TrainSample(
        token_ids=tokens,
        mask=mask,
        logprobs=[0.0] * len(tokens),
        temperatures=[1.0] * len(tokens),
        env=env,
        trace_id=example.prompt,
        rl_weights=[0.0] * len(tokens),
        ce_weights=[float(learned) for learned in mask],
    )


def _tokens(tokenizer: Any, messages: list[dict[str, str]], **options: bool) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **options))
