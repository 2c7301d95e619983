"""grpo: reward minus the mean of its group, never divided by the standard deviation (Dr. GRPO)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from prl.algo.base import Algorithm
from prl.algo.credit import (
    assign_advantage,
    centered,
    reward_of,
    trainable_traces,
    weigh_sampled,
    weighted_mean,
)
from prl.config.algo import GrpoConfig, LengthPenaltyConfig
from prl.records import Episode, Trace

G = TypeVar("G", bound=GrpoConfig)


class GroupBaseline(Algorithm[G]):
    """a = r - mean(r) over the trainable traces of the group, pooled over all agents."""

    async def score_group(self, episodes: list[Episode]) -> None:
        traces = trainable_traces(episodes)
        rewards = [reward_of(trace) for trace in traces]
        if self.config.length_penalty is not None:
            rewards = penalize_length(traces, rewards, self.config.length_penalty)
        lengths = [trace.num_sampled for trace in traces]
        baseline_weights = lengths if self.config.length_weighted_baseline else None
        for trace, advantage in zip(traces, centered(rewards, baseline_weights), strict=True):
            assign_advantage(trace, advantage)
        if self.config.loss_aggregation == "prompt":
            for trace in traces:
                weigh_sampled(trace, "rl", 1.0 / sum(lengths))


class Grpo(GroupBaseline[GrpoConfig]):
    """`algo=grpo`."""


def penalize_length(
    traces: Sequence[Trace], rewards: Sequence[float], penalty: LengthPenaltyConfig
) -> list[float]:
    """r_i - mean(r) * p_i, where p_i is the weighted sum of shares of the group's longest.

    The mean reward plays the role of the solve rate: an unsolved group feels no pressure.
    """
    sampled = [trace.num_sampled for trace in traces]
    given = [trace.num_tokens - trace.num_sampled for trace in traces]
    turns = [trace.num_turns for trace in traces]
    terms = ((penalty.output_tokens, sampled), (penalty.input_tokens, given), (penalty.turns, turns))
    solve_rate = weighted_mean(rewards)
    return [
        reward - solve_rate * sum(weight * sizes[i] / max(1, max(sizes)) for weight, sizes in terms)
        for i, reward in enumerate(rewards)
    ]
