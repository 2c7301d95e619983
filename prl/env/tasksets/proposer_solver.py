"""A proposer invents a word, solvers reverse it. Endless, from a seed, offline.

The proposer is asked `propose abcde` and answers with a word of its own in brackets. The solver then tries
`reverse <word>` several times, scored as in `reverse_text`. The proposer earns most when the solvers get it
about half right. A proposal that is no word earns nothing, and the seed word takes its place.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import string
from collections.abc import Iterator
from statistics import mean

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._brackets import BracketData, BracketTask, bracketed, reply

WORD = re.compile(r"[a-z]{3,8}")


class ProposalData(vf.TaskData):
    """A word to start from."""

    word: str


class ProposalTask(vf.Task[ProposalData]):
    """The proposer's turn; scored by what the solvers made of it."""


class ProposerSolverConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    seed: int = 0


class ProposerSolverTaskset(vf.Taskset[ProposalTask, ProposerSolverConfig]):
    """Random words to start from."""

    INFINITE = True

    def load(self) -> Iterator[ProposalTask]:
        rng = random.Random(self.config.seed)
        for _ in itertools.count():
            word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 8)))
            yield ProposalTask(ProposalData(prompt=f"propose {word}", word=word), self.config.task)


class ProposerSolverEnvConfig(vf.EnvConfig):
    """Options of `env.<name>.agents`: both seats, and how often the solver tries."""

    proposer: vf.AgentConfig = vf.AgentConfig()
    solver: vf.AgentConfig = vf.AgentConfig()
    attempts: int = Field(4, ge=1)
    max_concurrent_agents: int | None = Field(None, ge=1)


class ProposerSolverEnv(vf.Env[ProposerSolverEnvConfig]):
    """One proposal and `attempts` independent solutions of it."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        proposal = await agents.proposer.run(task)
        word = proposed_word(reply(proposal)) or task.data.word
        problem = BracketTask(BracketData(idx=task.data.idx, prompt=f"reverse {word}", answer=word[::-1]))
        await asyncio.gather(*(agents.solver.run(problem) for _ in range(self.config.attempts)))

    async def finalize(self, task: vf.Task, episode: vf.Episode) -> None:
        (proposal,) = episode.by_agent["proposer"]
        solved = mean(trace.reward for trace in episode.by_agent["solver"])
        valid = proposed_word(reply(proposal)) is not None
        proposal.record_reward("challenge", challenge(solved) if valid else 0.0)
        proposal.record_metric("valid", valid)
        proposal.record_metric("solved", solved)


def proposed_word(text: str) -> str | None:
    """The bracketed word of a proposal, if it is one of 3 to 8 lowercase letters."""
    word = bracketed(text)
    return word if word is not None and WORD.fullmatch(word) else None


def challenge(solved: float) -> float:
    """1 when the solvers' mean reward is 0.5, falling to 0 when it is 0 or 1."""
    return 1.0 - abs(2.0 * solved - 1.0)


__all__ = ["ProposerSolverEnv", "ProposerSolverTaskset"]
