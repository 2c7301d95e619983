"""Sort names by last name, then sort more names in. Endless, from a seed, offline, several turns.

Each turn the reply is a list, one name a line. A turn scores by the share of places that are right; a reply
with other names than those asked for scores 0. The reward is the mean over the turns.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prl.env.tasksets._brackets import positional_match
from prl.env.tasksets._shared_box import SharedBoxEnv

FIRST = re.findall(
    r"\w+",
    """
    Ana Bo Carl Dewi Ezra Fay Gus Hui Ida Jon Kim Leo Mia Noor Olu Pia Raj Sven Tom Uma Vik Wim Yara
    Zoe
""",
)
LAST = re.findall(
    r"\w+",
    """
    Abbott Baker Castro Dube Evans Farah Gomez Haas Ito Jansen Kaur Lopez Moreau Nguyen Okafor Park
    Quinn Rossi Silva Tanaka Usman Varga Weber Xu Yilmaz Zhang
""",
)
SYSTEM = "Sort the names alphabetically by last name. Answer with the sorted list alone, one name a line."


class AlphabetSortData(vf.TaskData):
    turns: list[list[str]]
    """The names that are new in each turn, in the order shown."""


class AlphabetSortTask(vf.Task[AlphabetSortData]):
    """Scores each turn's list."""

    @vf.reward
    async def places(self, trace: vf.Trace) -> float:
        return sum(self.scores(trace)) / len(self.data.turns)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(all(score == 1.0 for score in self.scores(trace)))

    def scores(self, trace: vf.Trace) -> list[float]:
        """Of every turn; one that never came scores 0."""
        replies = [message.content or "" for message in trace.assistant_messages]
        wanted = [expected(self.data.turns[: turn + 1]) for turn in range(len(self.data.turns))]
        return [
            list_score(w, reply)
            for w, reply in itertools.zip_longest(wanted, replies[: len(wanted)], fillvalue="")
        ]


class AlphabetSortConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0
    min_turns: int = Field(1, ge=1)
    max_turns: int = Field(3, ge=1, le=5)
    names_per_turn: int = Field(4, ge=2, le=5)
    num_tasks: int | None = Field(None, ge=1)
    """Stop after so many tasks; None = endless."""

    @model_validator(mode="after")
    def _check_turns(self) -> Self:
        if self.max_turns < self.min_turns:
            raise ValueError(f"max_turns={self.max_turns} is below min_turns={self.min_turns}")
        return self


class AlphabetSortTaskset(vf.Taskset[AlphabetSortTask, AlphabetSortConfig]):
    """Random names; no last name comes twice in a task, so that the order is unique."""

    INFINITE = True

    def __init__(self, config: AlphabetSortConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[AlphabetSortTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.islice(itertools.count(), self.config.num_tasks):
            count, size = (
                rng.randint(self.config.min_turns, self.config.max_turns),
                self.config.names_per_turn,
            )
            names = [f"{rng.choice(FIRST)} {last}" for last in rng.sample(LAST, count * size)]
            turns = [names[start : start + size] for start in range(0, len(names), size)]
            yield AlphabetSortTask(AlphabetSortData(system_prompt=SYSTEM, turns=turns), self.config.task)


class AlphabetSortEnv(SharedBoxEnv):
    """Asks turn by turn."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task, runtime=self._box) as chat:
            for number, names in enumerate(task.data.turns):
                ask = "Sort in these names too, and give the whole list:" if number else "Sort these names:"
                segment = await chat.turn("\n".join([ask, *names]))
                if segment.terminated:
                    return


def expected(turns: list[list[str]]) -> list[str]:
    """The right list after these turns."""
    return sorted(itertools.chain(*turns), key=lambda name: name.split()[-1])


def list_score(wanted: list[str], reply: str) -> float:
    """Share of right places; 0.0 unless exactly the wanted names are listed."""
    lines = [line.strip(" \t-*•.0123456789)") for line in reply.splitlines()]
    given = [line for line in lines if line]
    return positional_match(wanted, given) if sorted(given) == sorted(wanted) else 0.0  # type: ignore[arg-type]


__all__ = ["AlphabetSortEnv", "AlphabetSortTaskset"]
