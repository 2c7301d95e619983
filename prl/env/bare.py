"""verifiers' own client with nothing of prl around it: the baseline of `prl bench orchestrator`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.serve import EnvClient

from prl.config.schema import RlConfig
from prl.env.renderers import renderer_config
from prl.model_path import resolve_model_path


class BareClient:
    """Runs tasks of one environment server; the answer stays verifiers' `WireEpisode`."""

    def __init__(self, address: str, config: RlConfig, base_url: str, sampling: dict[str, Any]) -> None:
        self._client = EnvClient(address)
        self._request = {
            "client": vf.TrainClientConfig(
                base_url=base_url,
                api_key_var="PRL_API_KEY",
                renderer=renderer_config(config.model),
                renderer_model_name=str(resolve_model_path(config.model)),
            ),
            "model": config.model.name,
            "sampling": vf.SamplingConfig(**sampling),
        }

    async def work(self, tasks: Sequence[dict[str, Any]], ended: Callable[[], bool]) -> None:
        """One task after the other, for ever, until `ended()` (called after each) says so."""
        number = 0
        while True:
            await self._client.run(**self._request, task_data=tasks[number % len(tasks)])
            number += 1
            if ended():
                return

    async def close(self) -> None:
        await self._client.close()
