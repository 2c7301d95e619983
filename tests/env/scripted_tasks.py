"""A taskset whose tasks do what `mode` says: turns, tools, two seats, and every way to go wrong."""

from __future__ import annotations

import asyncio

import verifiers.v1 as vf

OPENS = ["five_turns", "two_seats", "frozen_seat", "no_turn"]
MODES = ["single", *OPENS, "raises", "nan", "none", "no_reward", "hangs"]


class ScriptedData(vf.TaskData):
    mode: str


class ScriptedTask(vf.Task[ScriptedData]):
    @vf.reward(weight=0.5)
    async def graded(self, trace: vf.Trace) -> float:
        match self.data.mode:
            case "raises":
                raise RuntimeError("no such grade")
            case "nan":
                return float("nan")
            case "none":
                return None  # type: ignore[return-value]
        return float(len(trace.last_reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ScriptedConfig(vf.TasksetConfig):
    repeat: bool = False


class ScriptedTaskset(vf.Taskset[ScriptedTask, ScriptedConfig]):
    def load(self):
        for mode in MODES:
            data = ScriptedData(mode=mode, prompt=None if mode in OPENS else f"reverse {mode[:3]}")
            yield ScriptedTask(data, self.config.task)

    def __iter__(self):
        tasks = list(super().__iter__())
        return iter([tasks[0], tasks[0]] if self.config.repeat else tasks)


class ScriptedEnvConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig()
    other: vf.AgentConfig = vf.AgentConfig()
    turns: int = 5


class ScriptedEnv(vf.Env[ScriptedEnvConfig]):
    async def run(self, task, agents):
        mode = task.data.mode
        if mode == "hangs":
            await asyncio.sleep(3600)
        if mode == "frozen_seat":
            agents.other.trainable = False
        if mode in ("two_seats", "frozen_seat"):
            await asyncio.gather(self._talk(task, agents.agent, 1), self._talk(task, agents.other, 2))
        elif mode in ("five_turns", "no_turn"):
            await self._talk(task, agents.agent, self.config.turns if mode == "five_turns" else 0)
        else:
            await agents.agent.run(task)

    async def _talk(self, task, agent, turns):
        async with agent.interaction(task) as chat:
            for turn in range(turns):
                if (await chat.turn(f"reverse ab{turn}")).terminated:
                    break

    async def finalize(self, task, episode):
        for trace in episode.traces:
            if task.data.mode == "no_reward":
                trace.rewards.clear()


__all__ = ["ScriptedEnv", "ScriptedTaskset"]
