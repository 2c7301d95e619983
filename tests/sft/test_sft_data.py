"""Generated examples and their tokens."""

from __future__ import annotations

import re
from typing import Any

import pytest

from prl.assets import bundled_model
from prl.config.schema import SftDataConfig, WarmStartDataConfig
from prl.sft.data import Example, WarmStart, build_dataset, render

END, USER, ASSISTANT = 7, 4, 5  # tokens of the bundled tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundled_model("tiny"))


def many(steps: int = 40, seed: int = 0, **fields: Any) -> list[Example]:
    dataset = WarmStart(WarmStartDataConfig(**fields), seed)
    return [example for step in range(1, steps + 1) for example in dataset.batch(step)]


def test_every_answer_is_right() -> None:
    for prompt, answer in many():
        bare = answer.removeprefix("[").removesuffix("]")
        assert answer in (bare, f"[{bare}]")
        if match := re.fullmatch(r"reverse ([a-z]{3,8})", prompt):
            assert bare == match[1][::-1]
        else:
            a, b = re.fullmatch(r"add (\d)\+(\d)", prompt).groups()
            assert bare == str(int(a) + int(b))


def test_shares_are_as_configured() -> None:
    examples = many(format_share=0.3, arithmetic_share=0.15)
    sums = sum(prompt.startswith("add") for prompt, _ in examples) / len(examples)
    brackets = sum(answer.startswith("[") for _, answer in examples) / len(examples)
    assert sums == pytest.approx(0.15, abs=0.03) and brackets == pytest.approx(0.3, abs=0.04)
    assert {len(p) - len("reverse ") for p, _ in examples if p.startswith("reverse")} == set(range(3, 9))
    assert all(answer.startswith("[") for _, answer in many(5, format_share=1.0))
    assert all(prompt.startswith("add") for prompt, _ in many(5, arithmetic_share=1.0))


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    config = WarmStartDataConfig(batch_size=5)
    assert WarmStart(config, 1).batch(7) == WarmStart(config, 1).batch(7)
    assert len(WarmStart(config, 1).batch(7)) == 5
    assert WarmStart(config, 1).batch(7) != WarmStart(config, 1).batch(8)
    assert WarmStart(config, 1).batch(7) != WarmStart(config, 2).batch(7)


def test_the_loss_is_on_the_answer_and_its_end(tokenizer: Any) -> None:
    sample = render(Example("add 3+4", "[7]"), tokenizer, "warm_start")
    letters = tokenizer.encode("add 3+4", add_special_tokens=False)
    answer = tokenizer.encode("[7]", add_special_tokens=False)
    assert sample.token_ids == [USER, *letters, END, ASSISTANT, *answer, END]
    learned = [token for token, weight in zip(sample.token_ids, sample.ce_weights, strict=True) if weight]
    assert learned == [*answer, END]
    assert sample.mask == [weight == 1.0 for weight in sample.ce_weights]
    assert set(sample.rl_weights) == {0.0} and sample.advantages is None
    assert sample.env == "warm_start" and set(sample.temperatures) == {1.0}


class Template:
    """A tokenizer whose chat template is a function of the messages."""

    eos_token_id = 9

    def __init__(self, render: Any) -> None:
        self._render = render

    def apply_chat_template(self, messages: list[dict], **options: Any) -> list[int]:
        return self._render(messages, options.get("add_generation_prompt", False))


def test_what_follows_the_end_of_the_turn_is_cut() -> None:
    template = Template(lambda messages, _: [1, 2] if len(messages) == 1 else [1, 2, 5, 9, 3])
    assert render(Example("q", "a"), template, "x").token_ids == [1, 2, 5, 9]


def test_an_end_token_in_the_prompt_is_no_end() -> None:
    template = Template(lambda messages, _: [1, 9, 2] if len(messages) == 1 else [1, 9, 2, 5, 9])
    assert render(Example("q", "a"), template, "x").token_ids == [1, 9, 2, 5, 9]


def test_a_template_that_rewrites_the_prompt_is_refused() -> None:
    template = Template(lambda messages, _: [1, 2] if len(messages) == 1 else [1, 3, 5, 9])
    with pytest.raises(ValueError, match="chat template"):
        render(Example("q", "a"), template, "x")


def test_unknown_data_is_refused() -> None:
    assert isinstance(build_dataset(WarmStartDataConfig(), 0), WarmStart)
    with pytest.raises(ValueError, match=r"data\.name=books"):
        build_dataset(SftDataConfig(name="books"), 0)
