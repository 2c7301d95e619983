"""rae: a running baseline per environment and agent (role-conditioned advantage estimation)."""

from __future__ import annotations

from typing import Any

from prl.algo.base import Algorithm, Services
from prl.algo.credit import assign_advantage, reward_of, trainable_traces
from prl.config.algo import RaeConfig
from prl.records import Episode


class Rae(Algorithm[RaeConfig]):
    """a = r - beta, then beta <- decay * beta + (1 - decay) * r; beta starts at 0. Groups of one are fine."""

    def __init__(self, config: RaeConfig, services: Services) -> None:
        if not 0 <= config.decay < 1:
            raise ValueError(f"algo.decay={config.decay} must be in [0, 1)")
        super().__init__(config, services)
        self.baselines: dict[str, float] = {}

    async def score_group(self, episodes: list[Episode]) -> None:
        for trace in trainable_traces(episodes):
            reward = reward_of(trace)
            baseline = self.baselines.get(trace.agent, 0.0)
            assign_advantage(trace, reward - baseline)
            self.baselines[trace.agent] = self.config.decay * baseline + (1 - self.config.decay) * reward

    def metrics(self) -> dict[str, float]:
        """`baseline/<agent>`: where the running baseline of each agent stands."""
        return {f"baseline/{agent}": value for agent, value in self.baselines.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"baselines": dict(self.baselines)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if set(state) != {"baselines"}:
            raise ValueError(
                f"algo 'rae' needs the state {{'baselines'}}, the checkpoint holds {sorted(state)}"
            )
        self.baselines = {agent: float(value) for agent, value in state["baselines"].items()}
