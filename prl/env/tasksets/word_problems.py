"""Arithmetic in the shape of GSM8K: a short story, a few steps, one whole number. Endless, from a seed.

The reward is 1 for the right number and 0 else, so that pass@k is defined. The answer is what follows the
last `####` or stands in the last `\\boxed{}`, else the last number of the reply.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._brackets import reply
from prl.env.tasksets._shared_box import SharedBoxEnv

PEOPLE = ("Ada", "Ben", "Chen", "Dina", "Emil", "Fatma", "Goran", "Hana", "Ivo", "Jun")
THINGS = ("apples", "stamps", "marbles", "books", "shells", "tickets", "cards", "pencils")
SYSTEM = "Solve the problem step by step. End with the answer as a whole number after ####, as in: #### 42"
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
ANSWERS = (rf"####\s*\$?({NUMBER})", rf"\\boxed\{{\s*\$?({NUMBER})", rf"({NUMBER})")
"""Where the answer is looked for, best place first."""
MOST_DIGITS = 18
"""No story has a longer answer; a reply may be nothing but digits."""


class WordProblemData(vf.TaskData):
    answer: int


class WordProblemTask(vf.Task[WordProblemData]):
    """Right or wrong."""

    @vf.reward
    async def right_number(self, trace: vf.Trace) -> float:
        return float(final_number(reply(trace)) == self.data.answer)

    @vf.metric
    async def has_marker(self, trace: vf.Trace) -> float:
        return float("####" in reply(trace))


class WordProblemConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0
    steps: int = Field(3, ge=1, le=8)
    """Most operations of a story; each has one to so many."""
    largest: int = Field(20, ge=2)
    """Largest number in a story."""
    num_tasks: int | None = Field(None, ge=1)
    """Stop after so many tasks; None = endless."""


class WordProblemTaskset(vf.Taskset[WordProblemTask, WordProblemConfig]):
    """Generated stories about somebody's belongings."""

    INFINITE = True

    def __init__(self, config: WordProblemConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[WordProblemTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.islice(itertools.count(), self.config.num_tasks):
            prompt, answer = story(rng, rng.randint(1, self.config.steps), self.config.largest)
            data = WordProblemData(prompt=prompt, system_prompt=SYSTEM, answer=answer)
            yield WordProblemTask(data, self.config.task)


def story(rng: random.Random, steps: int, largest: int) -> tuple[str, int]:
    """(question, answer): never negative, never a fraction."""
    (person, friend), things = rng.sample(PEOPLE, 2), rng.choice(THINGS)
    count = rng.randint(2, largest)
    sentences = [f"{person} has {count} {things}."]
    for _ in range(steps):
        sentence, count = rng.choice(EVENTS)(rng, count, largest, friend)
        sentences.append(sentence)
    return " ".join([*sentences, f"How many {things} does {person} have now?"]), count


def _gift(rng: random.Random, count: int, largest: int, friend: str) -> tuple[str, int]:
    more = rng.randint(1, largest)
    return f"{friend} brings {more} more.", count + more


def _loss(rng: random.Random, count: int, largest: int, friend: str) -> tuple[str, int]:
    fewer = rng.randint(0, min(count, largest))
    return f"{fewer} of them get lost.", count - fewer


def _packs(rng: random.Random, count: int, largest: int, friend: str) -> tuple[str, int]:
    packs, size = rng.randint(2, 5), rng.randint(2, max(2, largest // 4))
    return f"Then come {packs} packs with {size} in each.", count + packs * size


def _half(rng: random.Random, count: int, largest: int, friend: str) -> tuple[str, int]:
    if count % 2:
        return _gift(rng, count, largest, friend)
    return f"Half of them go to {friend}.", count // 2


def _double(rng: random.Random, count: int, largest: int, friend: str) -> tuple[str, int]:
    return f"{friend} gives as many as there are already.", 2 * count


EVENTS: tuple[Callable[[random.Random, int, int, str], tuple[str, int]], ...] = (
    _gift,
    _loss,
    _packs,
    _half,
    _double,
)


def final_number(text: str) -> int | None:
    """The answer of a reply; None if there is no number, or one that is not whole."""
    for pattern in ANSWERS:
        if found := re.findall(pattern, text):
            whole, _, decimals = found[-1].replace(",", "").partition(".")
            return None if decimals.strip("0") or len(whole) > MOST_DIGITS else int(whole)
    return None


__all__ = ["SharedBoxEnv", "WordProblemTaskset"]
