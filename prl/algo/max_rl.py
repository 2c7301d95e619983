"""max_rl: reward minus the group mean, divided by the group mean; meant for rewards of 0 and more."""

from __future__ import annotations

from prl.algo.base import Algorithm
from prl.algo.credit import assign_advantage, centered, reward_of, trainable_traces, weighted_mean
from prl.config.algo import MaxRlConfig
from prl.records import Episode


class MaxRl(Algorithm[MaxRlConfig]):
    """a = (r - m) / m with m = mean(r); 0 for everyone where m is not positive."""

    async def score_group(self, episodes: list[Episode]) -> None:
        traces = trainable_traces(episodes)
        rewards = [reward_of(trace) for trace in traces]
        mean = weighted_mean(rewards)
        for trace, difference in zip(traces, centered(rewards), strict=True):
            assign_advantage(trace, difference / mean if mean > 0 else 0.0)
