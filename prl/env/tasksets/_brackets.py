"""Tasks answered in square brackets, with partial credit: what the generated single-turn tasksets share."""

from __future__ import annotations

import verifiers.v1 as vf

FORMAT_CREDIT = 0.2


def positional_match(answer: str, guess: str) -> float:
    """Share of positions at which the two strings agree, over the longer one. 0.0 if both are empty."""
    longest = max(len(answer), len(guess))
    return sum(a == b for a, b in zip(answer, guess, strict=False)) / longest if longest else 0.0


def bracketed(text: str) -> str | None:
    """What stands in the brackets of a text that is `[...]` and nothing else."""
    return text[1:-1] if len(text) >= 2 and text[0] == "[" and text[-1] == "]" else None


def bracket_reward(answer: str, text: str, finished: bool) -> float:
    """0 without brackets; else 0.2 plus up to 0.8 by positional match; half of it if the reply was cut."""
    guess = bracketed(text)
    if guess is None:
        return 0.0
    reward = FORMAT_CREDIT + (1.0 - FORMAT_CREDIT) * positional_match(answer, guess)
    return reward if finished else reward / 2


def reply(trace: vf.Trace) -> str:
    """The model's last reply, untrimmed; special tokens are not part of it."""
    messages = trace.assistant_messages
    return (messages[-1].content or "") if messages else ""


class BracketData(vf.TaskData):
    """A prompt and the answer that belongs in the brackets."""

    answer: str
    demonstration: str = ""
    """A good reply, for algorithms that learn from one."""


def bracket_data(prompt: str, answer: str) -> BracketData:
    """A task with the reply that earns everything as its demonstration."""
    return BracketData(prompt=prompt, answer=answer, demonstration=f"[{answer}]")


class BracketTask(vf.Task[BracketData]):
    """Rewards the format and each right character."""

    @vf.reward
    async def answer_in_brackets(self, trace: vf.Trace) -> float:
        return bracket_reward(self.data.answer, reply(trace), finished=not trace.is_truncated)

    @vf.metric
    async def formatted(self, trace: vf.Trace) -> float:
        return float(bracketed(reply(trace)) is not None)

    @vf.metric
    async def exact(self, trace: vf.Trace) -> float:
        return float(bracketed(reply(trace)) == self.data.answer and not trace.is_truncated)
