"""Environment of tasks that never touch their runtime: all episodes of a worker share one box."""

from __future__ import annotations

from contextlib import AsyncExitStack

import verifiers.v1 as vf
from verifiers.v1.runtimes import provision_runtime


class SharedBoxEnv(vf.SingleAgentEnv):
    """One agent, one run an episode, in a box that the worker provisions once instead of once a rollout."""

    async def start(self) -> None:
        self._stack = AsyncExitStack()
        self._box = await self._stack.enter_async_context(provision_runtime(self.config.agent.runtime))

    async def stop(self) -> None:
        await self._stack.aclose()

    async def run(self, task: vf.Task, agents: vf.Agents) -> None:
        await agents.agent.run(task, runtime=self._box)
