"""opd: on-policy distillation, the reverse KL to a teacher on the policy's own tokens."""

from __future__ import annotations

from prl.algo.base import Algorithm, Services
from prl.algo.reference import attach_reference, fitting
from prl.config.algo import OpdConfig
from prl.records import Episode, Trace


class Opd(Algorithm[OpdConfig]):
    """Teacher logprobs on every sampled token; the loss turns q - l into the credit. No advantages."""

    action_loss = "ref_kl"

    def __init__(self, config: OpdConfig, services: Services) -> None:
        if services.teacher is None:
            raise ValueError(
                "algo 'opd' needs a teacher: set algo.teacher.model (and base_url if served elsewhere)"
            )
        super().__init__(config, services)
        self.teacher = services.teacher

    async def score_episode(self, episode: Episode) -> None:
        traces = fitting(episode.trainable_traces, self.services.longest)
        await attach_reference(traces, self._score)

    async def _score(self, trace: Trace, branch: int, token_ids: list[int]) -> list[float]:
        return await self.teacher.score(token_ids)
