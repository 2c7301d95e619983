"""Request parameters: defaults, bounds, what is ignored and what is refused."""

import pytest

from prl.inference.sampling_params import SamplingParams


def parse(**raw):
    return SamplingParams.from_request(raw, vocab_size=100)


def test_nothing_given_samples_the_model_itself():
    assert parse() == SamplingParams()
    assert parse(temperature=None, top_k=None, seed=None, max_tokens=None) == SamplingParams()
    assert not parse().filtered
    assert not parse().greedy


def test_what_a_rollout_sends_is_understood():
    raw = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 5, "min_tokens": 1, "top_k": 20, "min_p": 0.0}
    raw |= {"seed": 3, "logprobs": 1, "stop_token_ids": [2, 0], "skip_special_tokens": False}
    assert parse(**raw) == SamplingParams(
        temperature=0.7, top_p=0.9, top_k=20, seed=3, max_tokens=5, min_tokens=1, stop_token_ids=(0, 2)
    )


def test_unknown_keys_are_ignored():
    assert parse(routed_experts_prompt_start=4, whatever={"a": 1}) == SamplingParams()


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_is_off_at_zero_and_minus_one(top_k):
    assert not parse(top_k=top_k).filtered


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"temperature": -0.1}, r"temperature=-0\.1: must be in \[0, inf\]"),
        ({"temperature": float("nan")}, "temperature=nan: must be a number"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"temperature": True}, "temperature=True: must be a number"),
        ({"top_p": 0}, r"top_p=0: must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p=1.1"),
        ({"min_p": 2}, "min_p=2"),
        ({"top_k": -2}, "top_k=-2: must be at least -1"),
        ({"top_k": 1.5}, "top_k=1.5: must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"min_tokens": -1}, "min_tokens=-1"),
        ({"n": 0}, r"n=0: must be in \[1, 4096\]"),
        ({"seed": 2**63}, "seed="),
        ({"stop_token_ids": 7}, "stop_token_ids: must be a list"),
        ({"stop_token_ids": ["7"]}, "stop_token_ids: must be a list"),
    ],
)
def test_bad_values_are_named(raw, message):
    with pytest.raises(ValueError, match=message):
        parse(**raw)


@pytest.mark.parametrize(
    "raw", [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"logit_bias": {"5": 1.0}}]
)
def test_what_would_change_the_distribution_unseen_is_refused(raw):
    with pytest.raises(ValueError, match="not supported by the embedded engine"):
        parse(**raw)


def test_neutral_values_of_those_are_fine():
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}}
    assert parse(**neutral) == SamplingParams()


def test_stop_tokens_outside_the_vocabulary_can_never_match():
    assert parse(stop_token_ids=[5, 5, 100, -1]).stop_token_ids == (5,)


def test_tiny_temperatures_are_greedy():
    assert parse(temperature=0).greedy
    assert parse(temperature=1e-6).greedy
    assert not parse(temperature=1e-3).greedy
    assert not parse(temperature=0, top_k=3).filtered


def test_choices_of_one_request_get_their_own_seeds():
    params = parse(seed=2**63 - 1, n=3)
    assert [params.for_choice(i).seed for i in range(3)] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert parse(n=2).for_choice(1).seed is None
