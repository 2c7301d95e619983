"""Add two numbers: `add 3+4` is answered by `[7]`. Endless, generated from a seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._brackets import BracketTask, bracket_data
from prl.env.tasksets._shared_box import SharedBoxEnv


class ArithmeticConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0
    digits: int = Field(1, ge=1, le=9)
    """Most digits of a number."""
    num_tasks: int | None = Field(None, ge=1)
    """Stop after so many tasks; None = endless."""


class ArithmeticTaskset(vf.Taskset[BracketTask, ArithmeticConfig]):
    """Sums of numbers from 0 up to `digits` nines."""

    INFINITE = True

    def __init__(self, config: ArithmeticConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[BracketTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.islice(itertools.count(), self.config.num_tasks):
            a, b = (rng.randrange(10**self.config.digits) for _ in range(2))
            yield BracketTask(bracket_data(f"add {a}+{b}", str(a + b)), self.config.task)


__all__ = ["ArithmeticTaskset", "SharedBoxEnv"]
