"""Continuous batching: what comes out is what the model says, whatever else is in the batch."""

import dataclasses

import inference_models as lab
import pytest
import torch
from safetensors.torch import save_file

from prl.inference.sampling_params import SamplingParams


@torch.no_grad()
def greedy_reference(model, prompt, tokens):
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        max_new_tokens=tokens,
        do_sample=False,
    )
    return output[0, len(prompt) :].tolist()


def key(completions):
    return [completion.token_ids for completion in completions]


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_greedy_equals_transformers_generate(family, model_dirs, prompts):
    model = lab.build(family)
    engine = lab.sampler(model_dirs(family), slots=5)
    completions = lab.sample(engine, prompts, temperature=0.0, max_tokens=24)
    assert key(completions) == [greedy_reference(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_logprobs_equal_a_trainer_forward_before_and_after_updates(
    temperature, tiny_dir, tiny_model, prompts, tmp_path
):
    """Eleven policy versions, each an optimizer step apart, loaded into the same memory."""
    engine = lab.sampler(tiny_dir, slots=6)
    optimizer = torch.optim.AdamW(tiny_model.parameters(), lr=1e-2)
    gaps, previous = [], None
    for version in range(11):
        if version > 0:
            tiny_model(torch.tensor([prompts[0]])).logits.logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            publish(tiny_model, tmp_path)
            engine.update_weights(tmp_path, version, "full")
        completions = lab.sample(engine, prompts, temperature=temperature, max_tokens=12, seed=version)
        for prompt, completion in zip(prompts, completions, strict=True):
            expected = lab.reference_logprobs(tiny_model, prompt, completion.token_ids, temperature)
            gaps.append(max(abs(a - b) for a, b in zip(completion.logprobs, expected, strict=True)))
            assert [span.version for span in completion.weight_versions] == [version]
        greedy = key(lab.sample(engine, prompts, temperature=0.0, max_tokens=12))
        assert greedy != previous  # the update did something
        previous = greedy
    assert max(gaps) < 1e-4


def publish(model, directory):
    tensors = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 30, "top_p": 0.9, "min_p": 0.01}]
)
def test_filtered_logprobs_are_renormalised(filters, tiny_dir, tiny_model, prompts):
    engine = lab.sampler(tiny_dir)
    for prompt, completion in zip(
        prompts, lab.sample(engine, prompts, temperature=0.8, max_tokens=8, seed=1, **filters), strict=True
    ):
        with torch.no_grad():
            rows = tiny_model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1]
        for row, token, logprob in zip(rows, completion.token_ids, completion.logprobs, strict=True):
            assert logprob == pytest.approx(filtered_reference(row, token, 0.8, **filters), abs=1e-4)


def filtered_reference(row, token, temperature, top_k=0, top_p=1.0, min_p=0.0):
    probabilities = torch.softmax(row.double() / temperature, dim=-1)
    order = probabilities.argsort(descending=True).tolist()
    kept = [t for t in order if probabilities[t] >= min_p * probabilities[order[0]]]
    kept = kept[:top_k] if top_k else kept
    total = sum(probabilities[t] for t in kept)
    nucleus, mass = [], 0.0
    for t in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(t)
        mass += probabilities[t]
    assert token in nucleus
    return float((probabilities[token] / sum(probabilities[t] for t in nucleus)).log())


def test_sampled_frequencies_follow_the_model(tiny_dir, tiny_model):
    """First tokens of 6000 unseeded requests against the exact probabilities (chi-square, p = 1e-6)."""
    engine = lab.sampler(tiny_dir, slots=128, seed=11)
    prompt, draws = [4, 20, 30, 40], 6000
    completions = lab.sample(engine, [prompt] * draws, max_tokens=1, top_k=12)
    with torch.no_grad():
        logits = tiny_model(torch.tensor([prompt])).logits[0, -1].double()
    top = logits.topk(12)
    expected = torch.softmax(top.values, dim=-1) * draws
    drawn = [completion.token_ids[0] for completion in completions]
    counts = torch.tensor([drawn.count(token) for token in top.indices.tolist()])
    assert counts.sum() == draws
    assert ((counts - expected).square() / expected).sum() < 50.0


def test_first_tokens_over_seeds_follow_the_model(tiny_dir, tiny_model):
    """Consecutive seeds must behave like independent draws."""
    engine = lab.sampler(tiny_dir, slots=128)
    prompt, draws = [4, 20, 30, 40], 3000
    requests = [engine.make_request(prompt, SamplingParams(seed=s, max_tokens=2)) for s in range(draws)]
    engine.submit(*requests)
    completions = lab.drain(engine, requests)
    with torch.no_grad():
        exact = torch.softmax(tiny_model(torch.tensor([prompt])).logits[0, -1].double(), dim=-1)
    top = exact.topk(8)
    drawn = [completion.token_ids[0] for completion in completions]
    counts = torch.tensor([drawn.count(token) for token in top.indices.tolist()], dtype=torch.float64)
    rest = draws - counts.sum()
    counts, expected = torch.cat((counts, rest[None])), torch.cat((top.values, 1 - top.values.sum(0, True)))
    assert ((counts - expected * draws).square() / (expected * draws)).sum() < 43.0


def test_a_seeded_request_does_not_depend_on_its_company(tiny_dir, prompts):
    alone = []
    for prompt in prompts:
        alone += lab.sample(lab.sampler(tiny_dir, slots=1), [prompt], seed=77, max_tokens=20)
    crowded = lab.sampler(tiny_dir, slots=16, seed=5)
    noise = [
        crowded.make_request(prompt[:4], SamplingParams(max_tokens=3 + i)) for i, prompt in enumerate(prompts)
    ]
    crowded.submit(*noise)
    crowded.step()
    together = lab.sample(crowded, prompts, seed=77, max_tokens=20)
    assert key(together) == key(alone)
    for one, other in zip(alone, together, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


def test_a_seed_gives_the_same_beginning_whatever_the_limit(tiny_dir):
    prompt = [4, 20, 30]
    long = lab.sample(lab.sampler(tiny_dir), [prompt], seed=9, max_tokens=40, ignore_eos=True)[0]
    for limit in (1, 2, 15, 16, 17, 39):
        short = lab.sample(lab.sampler(tiny_dir), [prompt], seed=9, max_tokens=limit, ignore_eos=True)[0]
        assert short.token_ids == long.token_ids[:limit]


def test_unseeded_requests_differ_and_repeat_with_the_engine_seed(tiny_dir):
    def run(seed):
        engine = lab.sampler(tiny_dir, seed=seed)
        return key(lab.sample(engine, [[4, 20, 30]] * 6, max_tokens=12, ignore_eos=True))

    first = run(3)
    assert len(set(map(tuple, first))) == 6
    assert run(3) == first
    assert run(4) != first


def test_identical_prompts_are_read_once(tiny_dir, monkeypatch):
    engine = lab.sampler(tiny_dir)
    read = []
    real = engine.model.prefill
    monkeypatch.setattr(engine.model, "prefill", lambda ids, *rest: read.append(len(ids)) or real(ids, *rest))
    shared = lab.sample(engine, [[4, 20, 30]] * 5 + [[9, 9]], seed=1, max_tokens=6)
    assert read == [2]
    single = [lab.sample(lab.sampler(tiny_dir), [p], seed=1, max_tokens=6)[0] for p in ([4, 20, 30], [9, 9])]
    assert key(shared) == [single[0].token_ids] * 5 + [single[1].token_ids]


def test_long_prompts_take_turns(tiny_dir, monkeypatch):
    monkeypatch.setattr("prl.inference.sampler.PREFILL_TOKENS", 40)
    engine = lab.sampler(tiny_dir)
    many = [[token] * 15 for token in range(8, 14)]
    read = []
    real = engine.model.prefill
    monkeypatch.setattr(engine.model, "prefill", lambda ids, *rest: read.append(len(ids)) or real(ids, *rest))
    completions = lab.sample(engine, many, temperature=0.0, max_tokens=4)
    assert read == [2, 2, 2]
    assert key(completions) == key(lab.sample(lab.sampler(tiny_dir), many, temperature=0.0, max_tokens=4))


def test_more_requests_than_slots(tiny_dir, prompts):
    few, many = lab.sampler(tiny_dir, slots=2), lab.sampler(tiny_dir, slots=12)
    params = {"seed": 4, "max_tokens": 10}
    assert key(lab.sample(few, prompts, **params)) == key(lab.sample(many, prompts, **params))
    assert few.slots.active == 0
    assert (few.prompt_tokens, few.generated_tokens) == (many.prompt_tokens, many.generated_tokens)


def test_mixed_parameters_in_one_batch(tiny_dir, prompts):
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.6, "seed": 1},
        {"top_k": 2, "seed": 2},
        {"top_p": 0.5, "seed": 3},
    ]
    engine = lab.sampler(tiny_dir)
    requests = [
        engine.make_request(prompt, SamplingParams(max_tokens=9, **kinds[i % 4]))
        for i, prompt in enumerate(prompts)
    ]
    engine.submit(*requests)
    together = lab.drain(engine, requests)
    for i, prompt in enumerate(prompts):
        single = lab.sample(lab.sampler(tiny_dir), [prompt], max_tokens=9, **kinds[i % 4])[0]
        assert together[i].token_ids == single.token_ids
        assert together[i].logprobs == pytest.approx(single.logprobs, abs=1e-5)


def test_prompt_logprobs_equal_a_forward(tiny_dir, tiny_model, prompts, monkeypatch):
    monkeypatch.setattr("prl.inference.sampler.SCORED_LOGITS", 5 * lab.VOCAB)  # several chunks
    engine = lab.sampler(tiny_dir)
    completions = lab.sample(engine, prompts, prompt_logprobs=True, max_tokens=1, temperature=0.5)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = lab.reference_logprobs(tiny_model, prompt[:1], prompt[1:], 1.0)
        assert completion.prompt_logprobs == pytest.approx([0.0, *expected], abs=1e-4)
    assert lab.sample(engine, [[5]], prompt_logprobs=True, max_tokens=1)[0].prompt_logprobs == [0.0]
    assert lab.sample(engine, [[5, 6]], max_tokens=1)[0].prompt_logprobs is None


def test_the_stop_token_is_returned_and_ends(tiny_dir):
    free = lab.sample(lab.sampler(tiny_dir), [[4, 20, 30]], seed=2, max_tokens=30, ignore_eos=True)[0]
    stop = free.token_ids[6]
    assert stop not in free.token_ids[:6]
    stopped = lab.sample(
        lab.sampler(tiny_dir), [[4, 20, 30]], seed=2, max_tokens=30, ignore_eos=True, stop_token_ids=(3, stop)
    )[0]
    assert stopped.token_ids == free.token_ids[:7]
    assert stopped.logprobs == free.logprobs[:7]
    assert (stopped.finish_reason, free.finish_reason) == ("stop", "length")


def test_eos_ends_unless_ignored(tiny_dir):
    engine = lab.sampler(tiny_dir)
    free = lab.sample(engine, [[4, 20]], temperature=0.0, max_tokens=9, ignore_eos=True)[0]
    end = free.token_ids[2]
    assert (len(free.token_ids), free.finish_reason) == (9, "length")
    engine.model.config = dataclasses.replace(engine.model.config, eos_token_ids=(3, end))
    ended = lab.sample(engine, [[4, 20]], temperature=0.0, max_tokens=9)[0]
    assert ended.token_ids == free.token_ids[: free.token_ids.index(end) + 1]
    assert ended.finish_reason == "stop"
    ignored = lab.sample(engine, [[4, 20]], temperature=0.0, max_tokens=9, ignore_eos=True)[0]
    assert ignored.token_ids == free.token_ids


def test_min_tokens_hold_the_stop_back_and_renormalise(tiny_dir, tiny_model):
    engine = lab.sampler(tiny_dir)
    stops = tuple(range(100, 264))
    completion = lab.sample(
        engine, [[4, 20, 30]], seed=3, max_tokens=20, min_tokens=6, stop_token_ids=stops, ignore_eos=True
    )[0]
    assert len(completion.token_ids) >= 7
    assert all(token < 100 for token in completion.token_ids[:6])
    with torch.no_grad():
        rows = tiny_model(torch.tensor([[4, 20, 30, *completion.token_ids]])).logits[0, 2:-1]
    held = torch.log_softmax(rows[:6, :100], dim=-1)
    expected = [float(held[i, token]) for i, token in enumerate(completion.token_ids[:6])]
    assert completion.logprobs[:6] == pytest.approx(expected, abs=1e-4)


def test_the_context_ends_a_completion(tiny_dir):
    engine = lab.sampler(tiny_dir, max_length=16)
    completion = lab.sample(engine, [[4] * 10], ignore_eos=True)[0]
    assert (len(completion.token_ids), completion.finish_reason) == (6, "length")
    assert len(lab.sample(engine, [[4] * 10], ignore_eos=True, max_tokens=100)[0].token_ids) == 6
    assert len(lab.sample(engine, [[4] * 15], ignore_eos=True)[0].token_ids) == 1


def test_a_full_context_can_be_scored_but_not_continued(tiny_dir, tiny_model):
    engine = lab.sampler(tiny_dir, max_length=16)
    prompt = list(range(20, 36))
    scored = lab.sample(engine, [prompt], prompt_logprobs=True, max_tokens=1)[0]
    expected = lab.reference_logprobs(tiny_model, prompt[:1], prompt[1:], 1.0)
    assert scored.prompt_logprobs == pytest.approx([0.0, *expected], abs=1e-4)
    for params in (SamplingParams(), SamplingParams(max_tokens=1), SamplingParams(prompt_logprobs=True)):
        with pytest.raises(ValueError, match=r"maximum context length is 16 tokens.*has 16 tokens"):
            engine.make_request(prompt, params)


@pytest.mark.parametrize(
    ("prompt", "message"), [([], "empty"), ([264], r"outside \[0, 264\)"), ([-1], "outside")]
)
def test_bad_prompts_are_refused(prompt, message, tiny_dir):
    with pytest.raises(ValueError, match=message):
        lab.sampler(tiny_dir).make_request(prompt, SamplingParams())


def test_cancelling_frees_slots_and_touches_nobody_else(tiny_dir, prompts):
    expected = lab.sample(lab.sampler(tiny_dir, slots=12), prompts, seed=8, max_tokens=15)
    engine = lab.sampler(tiny_dir, slots=6)
    requests = [engine.make_request(prompt, SamplingParams(seed=8, max_tokens=15)) for prompt in prompts]
    engine.submit(*requests)
    for _ in range(4):
        engine.step()
    running, waiting = requests[1], requests[-1]
    engine.cancel(running, waiting)
    kept = [request for request in requests if request not in (running, waiting)]
    found = {}
    while engine.busy:
        for output in engine.step():
            assert output.request not in (running, waiting)
            if output.completion:
                found[output.request] = output.completion
    assert [found[r].token_ids for r in kept] == [expected[requests.index(r)].token_ids for r in kept]
    assert engine.slots.active == 0


def test_cancelling_what_has_ended_is_harmless(tiny_dir):
    engine = lab.sampler(tiny_dir)
    request = engine.make_request([4, 5], SamplingParams(max_tokens=1))
    engine.submit(request)
    engine.step()
    engine.cancel(request)
    assert engine.step() == []


def test_watched_requests_see_every_token(tiny_dir):
    engine = lab.sampler(tiny_dir)
    watched = engine.make_request([4, 20], SamplingParams(seed=1, max_tokens=7), watched=True)
    engine.submit(watched, engine.make_request([4, 20], SamplingParams(max_tokens=9)))
    tokens, logprobs, completion = [], [], None
    while engine.busy:
        for output in engine.step():
            if output.request is watched:
                assert len(output.token_ids) == 1
                tokens += output.token_ids
                logprobs += output.logprobs
                completion = output.completion
    assert (tokens, logprobs) == (completion.token_ids, completion.logprobs)


def test_slots_survive_many_comings_and_goings(tiny_dir):
    """Three generations of requests of mixed length through few slots, compared one by one."""
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(8, 264, (3 + i % 11,), generator=generator).tolist() for i in range(40)]
    limits = [1 + (7 * i) % 23 for i in range(40)]
    engine = lab.sampler(tiny_dir, slots=7)
    requests = [
        engine.make_request(p, SamplingParams(seed=i, max_tokens=n, stop_token_ids=tuple(range(8, 8 + i))))
        for i, (p, n) in enumerate(zip(prompts, limits, strict=True))
    ]
    engine.submit(*requests)
    for i, completion in enumerate(lab.drain(engine, requests)):
        single = lab.sample(
            lab.sampler(tiny_dir, slots=1),
            [prompts[i]],
            seed=i,
            max_tokens=limits[i],
            stop_token_ids=tuple(range(8, 8 + i)),
        )[0]
        assert completion.token_ids == single.token_ids
        assert completion.finish_reason == single.finish_reason
