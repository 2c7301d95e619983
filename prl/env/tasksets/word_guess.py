"""Guess a five-letter word in six turns, with marks for each letter. Finite, offline, several turns.

A guess is the last word in brackets of a reply, as in `[crane]`. The marks come back letter by letter: `G`
right place, `Y` elsewhere in the word, `-` not in it. The reward is 1 for the word found, else 0; how close
the best guess came is a metric.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prl.env.tasksets._shared_box import SharedBoxEnv

WORDS = re.findall(
    r"\w+",
    """
    about above actor adapt after agent alarm album alert angle apple arena argue arrow aside audio
    award bacon badge basic beach began berry birth black blade blame blank blend block board bonus
    brain brand brave bread brick bride brief bring broad brown brush build cabin cable camel candy
    cargo carry catch cause chain chair chalk charm chart chase cheap check chess chest chief child
    choir civil claim class clean clear climb clock cloth cloud coach coast coral count court cover
    crane crash cream crowd crown curve cycle daily dance depth diary dozen draft drama dream dress
    drift drink drive eager eagle early earth eight elbow empty enemy enjoy entry equal event exact
    exist faith fancy fault favor fence fever field fifth fight final flame flash fleet floor flour
    fluid focus force frame fresh front frost fruit giant glass globe grace grade grain grand grape
    grass great green group guard guess guide habit happy harsh heart heavy hobby honey horse hotel
    house human humor ideal image index inner issue ivory jelly jewel joint judge juice knife knock
    label labor large laser
""",
)
SYSTEM = (
    "Find the hidden five-letter word. Guess by writing one word in brackets, like [crane]. You get marks: "
    "G = right letter and place, Y = letter elsewhere in the word, - = letter not in the word."
)


class WordGuessData(vf.TaskData):
    word: str


class WordGuessTask(vf.Task[WordGuessData]):
    """Found or not."""

    @vf.reward
    async def found(self, trace: vf.Trace) -> float:
        return float(self.data.word in guesses(trace))

    @vf.metric
    async def closest(self, trace: vf.Trace) -> float:
        """Most right places of a guess, as a share of the word."""
        return max((marks(self.data.word, guess).count("G") / 5 for guess in guesses(trace)), default=0.0)

    @vf.metric
    async def valid_guesses(self, trace: vf.Trace) -> float:
        return float(len(guesses(trace)))


class WordGuessConfig(vf.TasksetConfig):
    """Options of `env.<name>.taskset`."""

    num_tasks: int | None = Field(None, ge=1, le=len(WORDS))
    """The first so many of the words; None = all of them."""


class WordGuessTaskset(vf.Taskset[WordGuessTask, WordGuessConfig]):
    """One task a word."""

    def load(self) -> Iterator[WordGuessTask]:
        for word in WORDS[: self.config.num_tasks]:
            yield WordGuessTask(WordGuessData(name=word, system_prompt=SYSTEM, word=word), self.config.task)


class WordGuessEnvConfig(vf.EnvConfig):
    """Options of `env.<name>.agents`."""

    agent: vf.AgentConfig = vf.AgentConfig()
    turns: int = Field(6, ge=1)
    """Guesses allowed."""


class WordGuessEnv(SharedBoxEnv, vf.Env[WordGuessEnvConfig]):
    """The game master: marks each guess until the word is found."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        message = "Guess the word."
        async with agents.agent.interaction(task, runtime=self._box) as chat:
            for left in range(self.config.turns - 1, -1, -1):
                segment = await chat.turn(message)
                guess = parse_guess(segment.last_reply)
                if segment.terminated or guess == task.data.word:
                    return
                message = f"{verdict(task.data.word, guess)} {left} left."


def guesses(trace: vf.Trace) -> list[str]:
    """Every valid guess of a game, in order."""
    parsed = (parse_guess(message.content or "") for message in trace.assistant_messages)
    return [guess for guess in parsed if guess]


def parse_guess(text: str) -> str | None:
    """The last five-letter word in brackets, in lower case."""
    found = re.findall(r"\[\s*([A-Za-z]{5})\s*\]", text)
    return found[-1].lower() if found else None


def verdict(word: str, guess: str | None) -> str:
    return f"{guess}: {marks(word, guess)}." if guess else "No five-letter word in brackets."


def marks(word: str, guess: str) -> str:
    """Marks of a guess; a letter is marked no more often than the word has it, right places first."""
    left = Counter(w for w, g in zip(word, guess, strict=True) if w != g)
    shown = []
    for w, g in zip(word, guess, strict=True):
        if w == g:
            shown.append("G")
        elif left[g]:
            left[g] -= 1
            shown.append("Y")
        else:
            shown.append("-")
    return "".join(shown)


__all__ = ["WordGuessEnv", "WordGuessTaskset"]
