"""Reverse a word: `reverse abcde` is answered by `[edcba]`. Endless, generated from a seed."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterator
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prl.env.tasksets._brackets import BracketTask, bracket_data
from prl.env.tasksets._shared_box import SharedBoxEnv


class ReverseTextConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0
    min_length: int = Field(3, ge=1)
    max_length: int = Field(8, ge=1)
    num_tasks: int | None = Field(None, ge=1)
    """Stop after so many tasks; None = endless."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if self.max_length < self.min_length:
            raise ValueError(f"max_length={self.max_length} is below min_length={self.min_length}")
        return self


class ReverseTextTaskset(vf.Taskset[BracketTask, ReverseTextConfig]):
    """Words of random lowercase letters."""

    INFINITE = True

    def __init__(self, config: ReverseTextConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[BracketTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.islice(itertools.count(), self.config.num_tasks):
            length = rng.randint(self.config.min_length, self.config.max_length)
            word = "".join(rng.choices(string.ascii_lowercase, k=length))
            yield BracketTask(bracket_data(f"reverse {word}", word[::-1]), self.config.task)


__all__ = ["ReverseTextTaskset", "SharedBoxEnv"]
