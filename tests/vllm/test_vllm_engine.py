"""vLLM behind prl's routes: the same contract as the embedded engine, and the same proofs."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import aiohttp
import exactness
import inference_contract
import pytest
import torch
from engine_server import Engine
from vllm_facts import EOS, MAX_MODEL_LEN, VOCAB

from prl.config.serving import CollectiveConfig, SyncConfig

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def engine(server):
    return Engine(server.url, "tiny", VOCAB, MAX_MODEL_LEN, EOS)


@pytest.mark.parametrize("check", inference_contract.CONTRACT, ids=lambda check: check.__name__)
def test_contract(check, engine):
    async def run():
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:
            await check(session, engine)

    asyncio.run(run())


@pytest.fixture
def prompts():
    """The longest spans several blocks of the prefix cache, which is on."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, VOCAB, (n,), generator=generator).tolist() for n in (3, 40, 300)]


SYNCS = {
    "filesystem": lambda: SyncConfig(fingerprint="full"),
    "collective": lambda: CollectiveConfig(fingerprint="full", timeout=300.0, bucket_bytes=100_000),
}


@pytest.mark.parametrize("kind", [exactness.FullPolicy, exactness.LoraPolicy])
@pytest.mark.parametrize("sync", SYNCS)
def test_sampled_logprobs_are_the_trainers(sync, kind, engine, padded_tiny, tmp_path, prompts):
    start = exactness.FullPolicy(padded_tiny)  # an adapter is over the weights that the engine started with
    args = (engine.base_url, "tiny", start, SyncConfig(fingerprint="full"), tmp_path / "start", prompts)
    assert max(exactness.worst_gaps(*args, updates=0)) < 1e-4
    policy = kind(padded_tiny)
    gaps = exactness.worst_gaps(
        engine.base_url, "tiny", policy, SYNCS[sync](), tmp_path / "broadcasts", prompts
    )
    assert len(gaps) == 11 and max(gaps) < 1e-4, gaps


def test_the_prefix_cache_is_on(engine):
    """Else the test above would not show that keys and values of older weights are never used."""
    with urllib.request.urlopen(f"{engine.base_url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    queried = [line for line in lines if line.startswith("vllm:prefix_cache_queries_total{")]
    assert queried and sum(float(line.rsplit(" ", 1)[1]) for line in queried) > 0


def test_weights_that_do_not_fit_are_refused(engine, tmp_path):
    from prl.sync.filesystem import FilesystemPublisher

    publisher = FilesystemPublisher(tmp_path, SyncConfig())
    path = publisher.publish(1, {"model.norm.weight": torch.ones(5)}.items()).path
    request = urllib.request.Request(
        f"{engine.base_url}/update_weights", json.dumps({"weight_dir": path, "version": 1}).encode()
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=60)
    assert refused.value.code == 400
    assert "do not fit" in json.loads(refused.value.read())["error"]["message"]
