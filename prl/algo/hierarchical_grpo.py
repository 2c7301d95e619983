"""hierarchical_grpo: a group baseline per agent, for environments where one agent sets the others' tasks."""

from __future__ import annotations

from prl.algo.base import Algorithm, Services
from prl.algo.credit import assign_advantage, centered, reward_of
from prl.config.algo import HierarchicalGrpoConfig
from prl.records import Episode, Trace


class HierarchicalGrpo(Algorithm[HierarchicalGrpoConfig]):
    """a = r - mean over peers: the same agent in the same episode for `episode_agents`, else in the group."""

    def __init__(self, config: HierarchicalGrpoConfig, services: Services) -> None:
        if not config.episode_agents:
            raise ValueError("algo.episode_agents is empty; name at least one agent, or use algo=grpo")
        super().__init__(config, services)

    async def score_group(self, episodes: list[Episode]) -> None:
        peers: dict[tuple[str, str | None], list[Trace]] = {}
        for episode in episodes:
            for trace in episode.trainable_traces:
                within = episode.id if trace.agent in self.config.episode_agents else None
                peers.setdefault((trace.agent, within), []).append(trace)
        for traces in peers.values():
            rewards = [reward_of(trace) for trace in traces]
            for trace, advantage in zip(traces, centered(rewards), strict=True):
                assign_advantage(trace, advantage)
