"""The processed distribution against a float64 reference, and draws against exact probabilities."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.inference.sampling import Controls, ban_tokens, draw, keep_likely, processed_logprobs

INF = math.inf


def controls(rows, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, greedy=False):
    filtered = top_p < 1 or top_k > 0 or min_p > 0
    return Controls(
        temperature=torch.full((rows,), temperature),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        top_k=torch.full((rows,), top_k, dtype=torch.int64),
        greedy=torch.ones(rows, dtype=torch.bool) if greedy else None,
        filtered=torch.arange(rows) if filtered else None,
    )


def reference(logits, temperature, top_p, top_k, min_p):
    """Log-probabilities in plain Python floats, written from the definitions."""
    scaled = [x / temperature for x in logits]
    highest = max(scaled)
    weight = {i: math.exp(x - highest) for i, x in enumerate(scaled)}
    likely = sorted(weight, key=lambda i: -weight[i])
    kept = [i for i in likely if weight[i] >= min_p * weight[likely[0]]]
    if top_k > 0:
        kept = kept[:top_k]
    nucleus, mass, total = [], 0.0, sum(weight[i] for i in kept)
    for i in kept:
        if nucleus and mass >= top_p * total:
            break
        nucleus.append(i)
        mass += weight[i]
    total = sum(weight[i] for i in nucleus)
    return [math.log(weight[i] / total) if i in nucleus else -INF for i in range(len(logits))]


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.6, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.99, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 500]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)
def test_processed_logprobs_equal_the_definition(seed, temperature, top_p, top_k, min_p):
    logits = torch.randn(2, 17, generator=torch.Generator().manual_seed(seed)) * 2
    settings_ = controls(2, temperature, top_p, top_k, min_p)
    expected = [reference(row, temperature, top_p, top_k, min_p) for row in logits.double().tolist()]
    actual = processed_logprobs(logits.clone(), settings_)
    torch.testing.assert_close(actual, torch.tensor(expected), atol=2e-6, rtol=1e-5)


def test_filters_apply_to_their_rows_only():
    logits = torch.randn(3, 9)
    mixed = controls(3)
    mixed.filtered = torch.tensor([1])
    mixed.top_k[1] = 2
    result = processed_logprobs(logits.clone(), mixed)
    plain = torch.log_softmax(logits, dim=-1)
    assert torch.equal(result[[0, 2]], plain[[0, 2]])
    assert torch.isfinite(result[1]).sum() == 2


def test_the_likeliest_token_survives_every_filter():
    logits = torch.zeros(1, 5)
    kept = keep_likely(logits, torch.tensor([0]), torch.tensor([1e-9]), torch.tensor([1.0]))
    assert torch.isfinite(kept).sum() == 1


def test_renormalised_mass_is_one():
    logits = torch.randn(4, 50)
    logprobs = processed_logprobs(logits, controls(4, temperature=0.6, top_p=0.7, top_k=20))
    torch.testing.assert_close(logprobs.exp().sum(dim=-1), torch.ones(4))


@pytest.mark.parametrize(
    "settings_", [{}, {"temperature": 0.6}, {"top_p": 0.8}, {"top_k": 3, "temperature": 1.3}]
)
def test_draws_follow_the_exact_probabilities(settings_):
    """Chi-square over 200 000 draws; the bound is the 1 - 1e-6 quantile, the seed is fixed."""
    draws = 200_000
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0]])
    logprobs = processed_logprobs(logits, controls(1, **settings_))
    uniforms = torch.rand(draws, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, chosen = draw(logprobs.expand(draws, -1), uniforms, None)
    expected = logprobs[0].double().exp() * draws
    counts = torch.bincount(tokens, minlength=8).double()
    live = expected > 0
    assert counts[~live].sum() == 0
    statistic = ((counts - expected)[live].square() / expected[live]).sum()
    quantile = {8: 41.0, 5: 33.4, 4: 30.7, 3: 27.7}[int(live.sum())]
    assert statistic < quantile
    assert torch.equal(chosen, logprobs[0, tokens])


def test_draw_inverts_the_cumulative_distribution():
    logprobs = torch.tensor([0.25, 0.0, 0.5, 0.25]).log().expand(6, -1)
    uniforms = torch.tensor([0.0, 0.24, 0.26, 0.74, 0.76, 1 - 2.0**-40], dtype=torch.float64)
    tokens, _ = draw(logprobs, uniforms, None)
    assert tokens.tolist() == [0, 0, 2, 2, 3, 3]


def test_an_impossible_token_is_never_drawn_at_the_edges():
    logprobs = torch.tensor([[-INF, 0.0, -INF]])
    for uniform in (0.0, 0.5, 1 - 2.0**-40):
        tokens, chosen = draw(logprobs, torch.tensor([uniform], dtype=torch.float64), None)
        assert (tokens.item(), chosen.item()) == (1, 0.0)


def test_greedy_rows_take_the_likeliest():
    logprobs = torch.log_softmax(torch.randn(5, 30), dim=-1)
    tokens, chosen = draw(logprobs, torch.rand(5, dtype=torch.float64), torch.tensor([True] * 5))
    assert torch.equal(tokens, logprobs.argmax(dim=-1))
    assert torch.equal(chosen, logprobs.max(dim=-1).values)


def test_logits_that_are_not_finite_show_in_the_logprob():
    logprobs = torch.log_softmax(torch.tensor([[0.0, math.nan], [0.0, 0.0]]), dim=-1)
    _, chosen = draw(logprobs, torch.rand(2, dtype=torch.float64), None)
    assert not torch.isfinite(chosen[0])
    assert torch.isfinite(chosen[1])


def test_banned_tokens_lose_their_mass():
    logits = torch.zeros(3, 4)
    ban_tokens(logits, torch.tensor([0, 2]), torch.tensor([[1, -1], [0, 3]]))
    assert logits.tolist() == [[0, -INF, 0, 0], [0, 0, 0, 0], [-INF, 0, 0, -INF]]


def test_a_ban_on_everything_is_ignored():
    logits = torch.zeros(1, 2)
    ban_tokens(logits, torch.tensor([0]), torch.tensor([[0, 1]]))
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("vocab", [8193, 8448, 20_000])
def test_draws_from_a_large_vocabulary_invert_the_same_distribution(vocab):
    """Against a running sum in float64 over the whole vocabulary, with most tokens filtered out."""
    random = torch.Generator().manual_seed(4)
    logits = torch.randn(40, vocab, generator=random) * 3
    logits[torch.rand(40, vocab, generator=random) < 0.9] = -torch.inf
    logprobs = torch.log_softmax(logits, dim=-1)
    uniforms = torch.rand(40, generator=random, dtype=torch.float64) * (1 - 2.0**-40)
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-40
    tokens, chosen = draw(logprobs, uniforms, None)
    mass = logprobs.double().exp().cumsum(-1)
    mass = mass / mass[:, -1:]
    rows = torch.arange(40)
    before = torch.nn.functional.pad(mass, (1, 0))[rows, tokens]
    assert torch.isfinite(chosen).all(), "a token that was filtered out is never drawn"
    assert (before <= uniforms + 1e-6).all() and (mass[rows, tokens] >= uniforms - 1e-6).all()
    assert torch.equal(chosen, logprobs[rows, tokens])
