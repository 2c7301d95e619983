"""Weights change under running requests: spans, kept keys and values, proof, divergence."""

from pathlib import Path

import inference_models as lab
import pytest
import torch
from transformers import DynamicCache

from prl.config.serving import SyncConfig
from prl.inference.request import VersionSpan
from prl.inference.sampler import NOT_FINITE
from prl.inference.sampling_params import SamplingParams
from prl.sync.filesystem import FilesystemPublisher
from prl.sync.fingerprint import fingerprint


@pytest.fixture
def publisher(tmp_path):
    return FilesystemPublisher(tmp_path / "broadcasts", SyncConfig(fingerprint="full", shard_bytes=20_000))


def apply(engine, publisher, version, model):
    """Publish a model and load it: what the publisher says of it, and the engine's fingerprint."""
    record = publisher.publish(version, model.named_parameters())
    return record, engine.update_weights(Path(record.path), version, "full")


def start(engine, count=3, tokens=12):
    requests = [
        engine.make_request([4, 20 + i], SamplingParams(seed=i, max_tokens=tokens, ignore_eos=True))
        for i in range(count)
    ]
    engine.submit(*requests)
    return requests


def test_trainer_and_engine_agree_on_every_update(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    for version in (1, 2, 3):
        record, served = apply(engine, publisher, version, lab.build("qwen3", seed=version))
        assert served == record.fingerprint


def test_weights_that_were_not_applied_do_not_match(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    record = publisher.publish(1, lab.build("qwen3", seed=1).named_parameters())
    assert engine.fingerprint("full") != record.fingerprint
    assert engine.update_weights(Path(record.path), 1, "full") == record.fingerprint
    engine.model.weights.layers[1].down[3, 4] += 1e-3  # one weight of the served memory
    assert engine.fingerprint("full") != record.fingerprint


def test_requests_in_flight_record_the_versions_that_made_them(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir, slots=2)
    requests = start(engine)  # the third waits for a slot
    for _ in range(5):
        engine.step()
    apply(engine, publisher, 1, lab.build("qwen3", seed=1))
    for _ in range(4):
        engine.step()
    for version in (2, 3):  # two updates without a token in between
        apply(engine, publisher, version, lab.build("qwen3", seed=2))
    first, second, third = lab.drain(engine, requests)
    assert first.weight_versions == second.weight_versions
    assert first.weight_versions == [VersionSpan(0, 5), VersionSpan(1, 4), VersionSpan(3, 3)]
    assert third.weight_versions == [VersionSpan(3, 12)]


@torch.no_grad()
def mixed_reference(old, new, prompt, sampled, switch):
    """Old weights up to token `switch`, then new weights on the old keys and values."""
    cache = DynamicCache(config=old.config)
    logits = [old(torch.tensor([prompt]), past_key_values=cache).logits[0, -1]]
    for number, token in enumerate(sampled[:-1], start=1):
        model = old if number < switch else new
        logits.append(model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1])
    table = torch.log_softmax(torch.stack(logits).double(), dim=-1)
    return table.gather(-1, torch.tensor(sampled)[:, None])[:, 0].tolist()


def test_sequences_go_on_with_their_keys_and_values(tiny_dir, tiny_model, publisher):
    engine = lab.sampler(tiny_dir)
    requests = start(engine)
    for _ in range(5):
        engine.step()
    new = lab.build("qwen3", seed=1)
    apply(engine, publisher, 1, new)
    for request, completion in zip(requests, lab.drain(engine, requests), strict=True):
        expected = mixed_reference(tiny_model, new, list(request.prompt), completion.token_ids, 5)
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_never_read_with_other_weights_than_its_version(tiny_dir, tiny_model, publisher):
    """The same prompt before and after an update: nothing of the first reading is reused."""
    engine = lab.sampler(tiny_dir)
    lab.sample(engine, [[4, 20, 30]], max_tokens=2)
    new = lab.build("qwen3", seed=1)
    apply(engine, publisher, 1, new)
    completion = lab.sample(engine, [[4, 20, 30]], seed=1, max_tokens=8)[0]
    expected = lab.reference_logprobs(new, [4, 20, 30], completion.token_ids, 1.0)
    assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_a_refused_update_keeps_version_and_weights(tiny_dir, publisher, model_dirs):
    engine = lab.sampler(tiny_dir)
    before = engine.fingerprint("full")
    with pytest.raises(ValueError, match="do not fit"):
        engine.update_weights(model_dirs("llama"), 5, "full")
    with pytest.raises(FileNotFoundError):
        engine.update_weights(publisher.broadcasts / "step_9", 9, "full")
    assert (engine.version, engine.fingerprint("full")) == (0, before)


def test_the_engine_serves_the_published_bits(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir)
    model = lab.build("qwen3", seed=4)
    apply(engine, publisher, 1, model)
    served = fingerprint(engine.model.weights.named_weights(), "full")
    assert served == fingerprint(model.named_parameters(), "full")


def test_diverged_weights_fail_requests_and_good_ones_recover(tiny_dir, publisher):
    engine = lab.sampler(tiny_dir, slots=4)
    broken = lab.build("qwen3")
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    apply(engine, publisher, 1, broken)
    failed = lab.sample(engine, [[4, 20, 30]] * 4, max_tokens=6)
    assert [completion.error for completion in failed] == [NOT_FINITE] * 4
    apply(engine, publisher, 2, lab.build("qwen3"))
    again = lab.sample(engine, [[4, 20, 30]] * 4, seed=1, max_tokens=6)
    assert [completion.error for completion in again] == [None] * 4
    assert (
        again[0].token_ids
        == lab.sample(lab.sampler(tiny_dir), [[4, 20, 30]], seed=1, max_tokens=6)[0].token_ids
    )


def test_the_run_decides_how_much_is_proven(tiny_dir, tmp_path):
    """A server that somebody else started may have another setting than the run that publishes."""
    import asyncio

    import engine_server

    from prl.inference.client import EngineAdmin

    publisher = FilesystemPublisher(tmp_path / "other", SyncConfig(fingerprint="sampled"))
    record = publisher.publish(1, lab.build("qwen3", seed=1).named_parameters())

    async def run(url):
        admin = EngineAdmin(url, timeout=30)
        try:
            return await admin.update_weights(record.path, 1)
        finally:
            await admin.aclose()

    with engine_server.serving(tiny_dir) as engine:  # its own setting is `full`
        answer = asyncio.run(run(engine.base_url))
    assert answer["fingerprint"] == record.fingerprint and record.fingerprint.startswith("sampled:")
