"""Reverse a word in two tries; between them a checker answers with the word reversed. Endless, from a seed.

The first try is that of `reverse_text`. Then a `tool` message says `edcba`, and the model may answer again.
The reward is the mean of both tries. What the checker says carries the skill itself: a policy that learns to
foresee it (`algo=echo`) learns to reverse.
"""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf

from prl.env.tasksets._brackets import BracketData, bracket_reward
from prl.env.tasksets._shared_box import SharedBoxEnv
from prl.env.tasksets.reverse_text import ReverseTextConfig, ReverseTextTaskset


class CheckedReverseEnv(SharedBoxEnv):
    """Two replies of one agent, with the checker's message between them."""

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        async with agents.agent.interaction(task, runtime=self._box) as agent:
            first = await agent.turn()
            if not first.terminated:
                await agent.turn([{"role": "tool", "tool_call_id": "check", "content": task.data.answer}])


class CheckedReverseTask(vf.Task[BracketData]):
    """Rewards the format and each right character of both tries."""

    @vf.reward
    async def mean_of_tries(self, trace: vf.Trace) -> float:
        return sum(self.scores(trace)) / 2

    @vf.metric
    async def first_try(self, trace: vf.Trace) -> float:
        return self.scores(trace)[0]

    @vf.metric
    async def second_try(self, trace: vf.Trace) -> float:
        return self.scores(trace)[1]

    def scores(self, trace: vf.Trace) -> tuple[float, float]:
        """Of the first and the second reply; a reply that never came is worth nothing."""
        replies = [message.content or "" for message in trace.assistant_messages[:2]] + ["", ""]
        return tuple(bracket_reward(self.data.answer, reply, finished=True) for reply in replies[:2])


class CheckedReverseTaskset(vf.Taskset[CheckedReverseTask, ReverseTextConfig]):
    """The words of `reverse_text`."""

    INFINITE = True

    def __init__(self, config: ReverseTextConfig) -> None:
        super().__init__(config)
        self.INFINITE = config.num_tasks is None

    def load(self) -> Iterator[CheckedReverseTask]:
        for task in ReverseTextTaskset(self.config).load():
            yield CheckedReverseTask(task.data, self.config.task)


__all__ = ["CheckedReverseEnv", "CheckedReverseTaskset"]
