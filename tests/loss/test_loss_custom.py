"""loss=custom: what a user's function gets, and what becomes of its answer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from loss_builders import joined, random_samples, row, run, sample

from prl.config.loss import CustomLossConfig, IcePopConfig
from prl.loss.custom import LossOutput

seen = []


def policy_gradient(inputs, scale=1.0):
    """Icepop by hand, with a metric of its own."""
    seen.append(inputs)
    log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
    ratio = torch.exp(log_ratio)
    keep = (ratio.detach() >= 0.2) & (ratio.detach() <= 5.0) & inputs.loss_mask
    weights = 1.0 if inputs.loss_weights is None else inputs.loss_weights
    loss = -(scale * weights * inputs.advantages * ratio)[keep].sum()
    return LossOutput(loss, {"kept": keep.float().mean(), "ratios": ratio[inputs.loss_mask]})


def sequence_ratio(inputs):
    """One ratio a sequence (GSPO-like), which a per-token loss could not express."""
    members = inputs.loss_mask
    mean = (inputs.trainer_logprobs - inputs.inference_logprobs)[members].mean()
    return LossOutput(-(torch.exp(mean) * inputs.advantages[members]).sum())


def not_a_number(inputs):
    poison = math.nan if inputs.advantages.max() > 1 else 1.0
    return LossOutput(inputs.trainer_logprobs.sum() * poison)


def no_metrics(inputs):
    return inputs.trainer_logprobs.sum()


def vector(inputs):
    return SimpleNamespace(loss=inputs.trainer_logprobs, metrics={})


def config(name, **fields):
    return CustomLossConfig(import_path=f"{__name__}:{name}", **fields)


def test_a_custom_loss_can_be_a_shipped_one():
    samples = random_samples(seed=3)
    samples[0].rl_weights = [0.5 * m for m in samples[0].mask]
    logprobs = [[b - 0.3 * (i % 3) for i, b in enumerate(s.logprobs)] for s in samples]
    rows, flat = (
        [row(samples[:5], 2), row(samples[5:])],
        [joined(logprobs[:5]) + [0.0] * 2, joined(logprobs[5:])],
    )
    loss, grads, _ = run(rows, flat, config("policy_gradient"))
    expected, slopes, _ = run(rows, flat, IcePopConfig())
    assert loss == pytest.approx(expected, rel=1e-5)
    for grad, slope in zip(grads, slopes, strict=True):
        assert grad == pytest.approx(slope, rel=1e-5, abs=1e-8)


def test_the_function_sees_one_sequence_with_its_members_resolved():
    seen.clear()
    first = sample([-1.0, -2.0], prompt=2, advantages=[3.0, 4.0], rl_weights=[0.0, 0.5])
    second = sample([-3.0], advantages=[5.0])
    untrained = sample([-1.0], ce_weights=[1.0], rl_weights=[0.0])
    logprobs = [math.nan, -9.0, -1.5, -2.5, 0.0, -3.5, 0.0, -1.0]
    run([row([first, second, untrained])], [logprobs], config("policy_gradient"))
    assert len(seen) == 2
    assert seen[0].trainer_logprobs.tolist() == [0, 0, 0, -2.5]
    assert seen[0].inference_logprobs.tolist() == [0, 0, 0, -2]
    assert seen[0].advantages.tolist() == [0, 0, 0, 4]
    assert seen[0].loss_mask.tolist() == [False, False, False, True]
    assert seen[0].loss_weights.tolist() == [0, 0, 0, 0.5]
    assert seen[0].ref_logprobs is None
    assert seen[1].advantages.tolist() == [0, 5]


def test_distillation_credit_reaches_the_function_as_advantages():
    seen.clear()
    one = sample([-1.0, -2.0], ref_kl_weights=[1.0, 1.0], ref_logprobs=[-0.5, -4.0], rl_weights=[0.0, 0.0])
    _, (grad,), (metrics,) = run([row([one])], [[0.0, -1.0, -2.0]], config("policy_gradient"))
    assert seen[0].advantages.tolist() == [0, 0.5, -2.0]
    assert seen[0].ref_logprobs.tolist() == [0, -0.5, -4.0]
    assert grad == pytest.approx([0, -0.25, 1.0])
    assert "ref_kl/kept" in metrics


def test_distillation_can_keep_the_fixed_rule():
    seen.clear()
    one = sample([-1.0], ref_kl_weights=[1.0], ref_logprobs=[-0.5], rl_weights=[0.0])
    _, (grad,), _ = run([row([one])], [[0.0, -1.0]], config("policy_gradient", ref_kl="one_sided"))
    assert seen == [] and grad == pytest.approx([0, -0.5])


def test_keyword_arguments_come_from_the_configuration():
    one = sample([-1.0], advantages=[1.0])
    _, (grad,), _ = run([row([one])], [[0.0, -1.0]], config("policy_gradient", kwargs={"scale": 3.0}))
    assert grad == pytest.approx([0, -3.0])


def test_its_metrics_are_joined_over_sequences():
    samples = [sample([-1.0, -1.0], advantages=[1.0, 1.0]), sample([-1.0], advantages=[1.0])]
    _, _, (metrics,) = run([row(samples)], [[0.0, -1.0, -1.0, 0.0, -1.0]], config("policy_gradient"))
    assert metrics["kept"].tolist() == pytest.approx([2 / 3, 1 / 2])
    assert metrics["ratios"].tolist() == pytest.approx([1.0, 1.0, 1.0])


def test_a_loss_over_whole_sequences_is_divided_by_tokens():
    one = sample([-1.0, -2.0], advantages=[1.0, 1.0])
    loss, (grad,), _ = run([row([one])], [[0.0, -0.8, -2.0]], config("sequence_ratio"))
    ratio = math.exp((-0.8 + 1.0) / 2)
    assert loss == pytest.approx(-ratio)
    assert grad == pytest.approx([0, -ratio / 2, -ratio / 2])


def test_a_loss_that_is_not_a_number_names_its_sequence():
    samples = [sample([-1.0], advantages=[1.0], trace_id="a"), sample([-1.0], advantages=[2.0], trace_id="b")]
    with pytest.raises(ValueError, match="trace 'b', token 1 of its sample: the rl loss is nan"):
        run([row(samples)], [[0.0, -1.0, 0.0, -1.0]], config("not_a_number"))


@pytest.mark.parametrize("name", ["no_metrics", "vector"])
def test_an_answer_of_the_wrong_kind_names_the_function(name):
    with pytest.raises(ValueError, match=rf"loss\.import_path=.*{name}.*LossOutput"):
        run([row([sample([-1.0], advantages=[1.0])])], [[0.0, -1.0]], config(name))


def test_a_missing_function_names_the_key():
    with pytest.raises(ValueError, match=r"loss\.import_path=.*has no 'nowhere'"):
        run([row([sample([-1.0], advantages=[1.0])])], [[0.0, -1.0]], config("nowhere"))
