"""The proof that the policy that samples is the policy that was trained, through an engine's real routes.

A policy changes at random ten times; each version is published, applied between pause and resume, and sampled
from at two temperatures. The sampled log-probabilities must be those of a forward pass of transformers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from prl.config.serving import SyncConfig
from prl.inference.client import EngineAdmin
from prl.sync.publishers import make_publisher
from prl.sync.versions import newest_version

TEMPERATURES = (0.6, 1.0)
SECONDS = 300.0


class FullPolicy:
    """A model whose every weight is trained."""

    adapter: dict[str, Any] | None = None

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._random = torch.Generator().manual_seed(11)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, parameter.detach()) for name, parameter in self.model.named_parameters())

    def change(self) -> None:
        """A step about as large as the weights' own spread, so that a missed update shows at once."""
        with torch.no_grad():
            for _, parameter in self._trained():
                noise = torch.randn(parameter.shape, generator=self._random)
                parameter.add_(0.2 * (parameter.std() if parameter.numel() > 1 else 1.0) * noise)

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()


class LoraPolicy(FullPolicy):
    """A frozen model under a LoRA adapter that PEFT computes."""

    def __init__(self, directory: Path) -> None:
        import peft

        super().__init__(directory)
        settings = peft.LoraConfig(
            r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "o_proj", "down_proj"]
        )
        self.model = peft.get_peft_model(self.model, settings)
        self._names = peft.get_peft_model_state_dict
        self.adapter = {
            key: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
            for key, value in self.model.peft_config["default"].to_dict().items()
        }

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, tensor.detach()) for name, tensor in self._names(self.model).items())

    def change(self) -> None:
        with torch.no_grad():
            for _, parameter in self._trained():
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=self._random))

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)


def worst_gaps(
    base_url: str,
    model: str,
    policy: FullPolicy,
    sync: SyncConfig,
    broadcasts: Path,
    prompts: list[list[int]],
    updates: int = 10,
) -> list[float]:
    """Largest |sampled - computed| log-probability at the start and after each update."""
    return asyncio.run(_gaps(base_url, model, policy, sync, broadcasts, prompts, updates))


async def _gaps(
    base_url: str,
    model: str,
    policy: FullPolicy,
    sync: SyncConfig,
    broadcasts: Path,
    prompts: list[list[int]],
    updates: int,
) -> list[float]:
    publisher = make_publisher(broadcasts, sync, 0, torch.device("cpu"))
    admin = EngineAdmin(base_url, timeout=SECONDS)
    gaps = []
    timeout = aiohttp.ClientTimeout(total=SECONDS)
    async with contextlib.aclosing(admin), aiohttp.ClientSession(timeout=timeout) as session:
        for version in range(updates + 1):
            if version:
                policy.change()
            sending = asyncio.create_task(
                asyncio.to_thread(publisher.publish, version, policy.tensors, policy.adapter)
            )
            await _apply(admin, broadcasts, version, sending)
            gaps.append(await _gap(session, base_url, model, policy, prompts, version))
    return gaps


async def _apply(admin: EngineAdmin, broadcasts: Path, version: int, sending: asyncio.Task[Any]) -> None:
    """What the orchestrator does once a version is there."""
    async with asyncio.timeout(SECONDS):
        while (found := newest_version(broadcasts)) is None or found.version < version:
            if sending.done():
                sending.result()
            await asyncio.sleep(0.01)
    await admin.pause()
    answer = await admin.update_weights(found.path, version)
    await admin.resume()
    served, published = (answer["version"], answer["fingerprint"]), await sending
    assert served == (version, published.fingerprint), f"{served} is served, {published} was published"


async def _gap(session, base_url, model, policy, prompts, version) -> float:
    """Prompts are the same in every version: keys and values kept from older weights would show."""
    cases = [(prompt, temperature) for prompt in prompts for temperature in TEMPERATURES]
    answers = await asyncio.gather(
        *(
            _sample(session, base_url, model, prompt, temperature, seed=100 * version + number)
            for number, (prompt, temperature) in enumerate(cases)
        )
    )
    worst = 0.0
    for (prompt, temperature), (tokens, logprobs) in zip(cases, answers, strict=True):
        computed = forward_logprobs(policy.model, prompt, tokens, temperature)
        worst = max(worst, float((torch.tensor(logprobs, dtype=torch.float64) - computed).abs().max()))
    return worst


async def _sample(session, base_url, model, prompt, temperature, seed) -> tuple[list[int], list[float]]:
    sampling = {"temperature": temperature, "max_tokens": 12, "seed": seed, "logprobs": 1, "ignore_eos": True}
    body = {"model": model, "token_ids": prompt, "sampling_params": sampling}
    async with session.post(f"{base_url}/inference/v1/generate", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    choice = answer["choices"][0]
    return choice["token_ids"], [entry["logprob"] for entry in choice["logprobs"]["content"]]


@torch.no_grad()
def forward_logprobs(model: Any, prompt: list[int], sampled: list[int], temperature: float) -> Tensor:
    """float64 [len(sampled)] of one forward pass over the whole sequence."""
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].double()
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(-1, torch.tensor(sampled)[:, None])[:, 0]
