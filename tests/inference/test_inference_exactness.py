"""Ten updates through the embedded engine's routes: the sampled policy is the trained one, every time."""

import engine_server
import exactness
import pytest
import torch

from prl.config.serving import CollectiveConfig, SyncConfig

SYNCS = {
    "filesystem": lambda: SyncConfig(fingerprint="full"),
    "collective": lambda: CollectiveConfig(fingerprint="full", timeout=120.0, bucket_bytes=20_000),
}


@pytest.fixture
def long_prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, 264, (n,), generator=generator).tolist() for n in (3, 17, 40)]


@pytest.mark.parametrize("kind", [exactness.FullPolicy, exactness.LoraPolicy])
@pytest.mark.parametrize("sync", SYNCS)
def test_sampled_logprobs_are_the_trainers(sync, kind, tiny_dir, tmp_path, long_prompts):
    policy = kind(tiny_dir)
    with engine_server.serving(tiny_dir, max_length=128) as engine:
        gaps = exactness.worst_gaps(
            engine.base_url, "tiny", policy, SYNCS[sync](), tmp_path / "broadcasts", long_prompts
        )
        assert engine.sampler.version == 10
    assert len(gaps) == 11 and max(gaps) < 1e-4, gaps


def test_an_update_that_is_missed_shows(tiny_dir, tmp_path, long_prompts, monkeypatch):
    """The bound can fail: an engine that keeps its weights is far beyond it (and its fingerprint differs)."""
    policy = exactness.FullPolicy(tiny_dir)
    with engine_server.serving(tiny_dir, max_length=128) as engine:
        monkeypatch.setattr(engine.sampler.receiver, "apply", lambda directory: None)
        policy.change()
        with pytest.raises(AssertionError, match="was published"):
            exactness.worst_gaps(
                engine.base_url, "tiny", policy, SyncConfig(), tmp_path / "b", long_prompts, updates=0
            )
        sampled = [20, 30, 40]
        moved = exactness.forward_logprobs(policy.model, [4, 9], sampled, 1.0)
        served = exactness.forward_logprobs(exactness.FullPolicy(tiny_dir).model, [4, 9], sampled, 1.0)
    assert (moved - served).abs().max() > 1e-2
