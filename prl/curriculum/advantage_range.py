"""advantage_range: rejects groups that teach nothing, by default those whose advantages are all 0."""

from __future__ import annotations

from collections.abc import Sequence

from prl.config.curriculum import AdvantageRangeConfig
from prl.records import Episode


class AdvantageRange:
    """Rejects a group iff it has advantages and every one lies in [reject_min, reject_max]."""

    def __init__(self, name: str, config: AdvantageRangeConfig) -> None:
        if config.reject_min > config.reject_max:
            raise ValueError(
                f"curriculum.gates.{name}: reject_min={config.reject_min} > reject_max={config.reject_max}"
            )
        self.low, self.high = config.reject_min, config.reject_max

    def admits(self, group: Sequence[Episode]) -> bool:
        advantages = [
            value
            for episode in group
            for trace in episode.trainable_traces
            for node in trace.nodes
            for value in node.advantages or ()
        ]
        return not advantages or not all(self.low <= value <= self.high for value in advantages)
