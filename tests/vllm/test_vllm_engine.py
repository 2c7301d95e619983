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


@pytest.fixture
def sabotage(server):
    """Set how the worker loads wrongly; it is left loading rightly."""
    yield server.sabotage.write_text
    server.sabotage.unlink(missing_ok=True)


def update(engine, published) -> dict:
    body = json.dumps({"weight_dir": published.path, "version": published.version}).encode()
    request = urllib.request.Request(f"{engine.base_url}/update_weights", body)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.loads(response.read())


def test_what_the_worker_computes_with_is_proven(engine, server, padded_tiny, sabotage, tmp_path):
    """Each fault gives another fingerprint than was published, and the log names the tensors."""
    from prl.sync.filesystem import FilesystemPublisher

    policy = exactness.FullPolicy(padded_tiny)
    publisher = FilesystemPublisher(tmp_path, SyncConfig(fingerprint="full"))
    found = {}
    for version, kind in enumerate(("right", "skip", "wrong", "head", "right")):
        policy.change()
        published = publisher.publish(version, policy.tensors())
        sabotage(kind)
        answer = update(engine, published)
        assert answer["unproven"] == 0, "every tensor of this model has a known place"
        found[version, kind] = answer["fingerprint"] == published.fingerprint
    assert found == {
        (0, "right"): True,
        (1, "skip"): False,
        (2, "wrong"): False,
        (3, "head"): False,
        (4, "right"): True,
    }
    told = [line for line in server.log.read_text().splitlines() if "other values than were received" in line]
    assert len(told) == 3
    assert (
        "more" in told[0]
        and "model.layers.1.self_attn.k_proj.weight" in told[1]
        and "model.embed_tokens.weight" in told[2]
    )


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
