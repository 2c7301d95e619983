"""Every loss against the formulas in float64: values and gradients, token by token."""

from __future__ import annotations

import math
import random

import pytest
import torch
from loss_builders import f32, row, run, sample
from loss_reference import BY_NAME, WORKED, cross_entropy, mismatch_kl, worked_inputs

from prl.config.loss import CispoConfig, IcePopConfig, IpoConfig, PpoConfig
from prl.loss.base import capped_ratio, probability_shift
from prl.loss.base import mismatch_kl as prl_mismatch_kl

LOSSES = {"ipo": IpoConfig, "icepop": IcePopConfig, "ppo": PpoConfig, "cispo": CispoConfig}
SETTINGS = {
    "ipo": [
        (IpoConfig(eps=0.1, adv_tau=0.5), {"eps": 0.1, "tau": 0.5}),
        (IpoConfig(eps=1.0, max_importance_ratio=3.0), {"eps": 1.0, "cap": 3.0}),
    ],
    "icepop": [
        (IcePopConfig(ratio_low=0.5, ratio_high=1.5, adv_tau=2.0), {"low": 0.5, "high": 1.5, "tau": 2.0}),
        (IcePopConfig(ratio_low=0.0), {"low": 0.0}),
    ],
    "ppo": [
        (PpoConfig(ratio_low=0.5, ratio_high=1.5, adv_tau=2.0), {"low": 0.5, "high": 1.5, "tau": 2.0}),
        (PpoConfig(max_importance_ratio=4.0), {"cap": 4.0}),
    ],
    "cispo": [
        (CispoConfig(ratio_low=0.5, ratio_high=1.5, adv_tau=2.0), {"low": 0.5, "high": 1.5, "tau": 2.0}),
        (CispoConfig(ratio_high=0.9), {"high": 0.9}),
    ],
}
CASES = [
    (name, config, options)
    for name, schema in LOSSES.items()
    for config, options in [(schema(), {}), *SETTINGS[name]]
]


def per_token(config, lp, b, **streams):
    """(loss, gradient, metrics) of one sample; every count is 1, so the loss is the plain sum."""
    micro = row([sample(b, **streams)])
    total, (grad,), (metrics,) = run([micro], [[0.0, *lp]], config, {"rl": 1, "ce": 1, "ref_kl": 1})
    return total, grad[1:], metrics


@pytest.mark.parametrize("config", [IpoConfig(eps=0.0), IcePopConfig(ratio_low=1.0, ratio_high=1.0)])
def test_bounds_include_their_ends(config):
    """The narrowest bounds there are still train what the policy itself sampled."""
    loss, grad, metrics = per_token(config, [-0.7, -1.5], [-0.7, -1.5], advantages=[2.0, -1.0])
    assert (loss, grad) == (-1.0, [-2.0, 1.0]) and not metrics["is_masked"].any()


@pytest.mark.parametrize(("column", "name"), enumerate(["ipo", "icepop", "ppo", "cispo"], start=5))
def test_worked_vectors(column, name):
    logprobs, behaviour, advantages = worked_inputs()
    for i, expected in enumerate(WORKED):
        lp, b, a = logprobs[i], behaviour[i], advantages[i]
        loss, (grad,), _ = per_token(LOSSES[name](), [lp], [b], advantages=[a])
        assert loss == pytest.approx(expected[column], rel=1e-5, abs=1e-6)
        reference, slope = BY_NAME[name](*f32([lp, b, a]))
        assert reference == pytest.approx(expected[column], rel=1e-5, abs=1e-6)
        assert (loss, grad) == (pytest.approx(reference, rel=1e-6), pytest.approx(slope, rel=1e-6))


def test_worked_mismatch_kl():
    logprobs, behaviour, advantages = worked_inputs()
    _, _, metrics = per_token(IpoConfig(), logprobs, behaviour, advantages=advantages)
    assert metrics["mismatch_kl/all"].tolist() == pytest.approx([r[4] for r in WORKED], rel=1e-4)
    ratios = [math.exp(lp - b) for lp, b in zip(logprobs, behaviour, strict=True)]
    assert ratios == pytest.approx([r[3] for r in WORKED])


@pytest.mark.parametrize(("name", "config", "options"), CASES)
def test_values_and_gradients_match_the_formulas(name, config, options):
    rng = random.Random(name)
    ranges = ((-6, -0.001), (-6, -0.001), (-2, 2), (0.1, 3))
    lp, b, a, w = (f32(rng.uniform(*bounds) for _ in range(400)) for bounds in ranges)
    loss, grad, _ = per_token(config, lp, b, advantages=a, rl_weights=w)
    expected = [BY_NAME[name](*token, **options) for token in zip(lp, b, a, w, strict=True)]
    assert grad == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-12)
    size = math.fsum(abs(value) for value, _ in expected)
    assert loss == pytest.approx(math.fsum(value for value, _ in expected), abs=1e-6 * size)
    dropped = [g for g, (value, slope) in zip(grad, expected, strict=True) if slope == 0]
    assert all(g == 0.0 for g in dropped)
    assert bool(dropped) == (name != "cispo" and options.get("eps") != 1.0)
    for i in range(40):
        one, _, _ = per_token(config, [lp[i]], [b[i]], advantages=[a[i]], rl_weights=[w[i]])
        assert one == pytest.approx(expected[i][0], rel=1e-6, abs=1e-12)


def test_cross_entropy_matches_its_formula():
    lp, w = f32([-0.2, -3.0, -7.5]), f32([1.0, 0.1, 2.5])
    loss, grad, metrics = per_token(IpoConfig(), lp, [0.0] * 3, ce_weights=w, rl_weights=[0.0] * 3)
    expected = [cross_entropy(*token) for token in zip(lp, w, strict=True)]
    assert loss == pytest.approx(sum(value for value, _ in expected), rel=1e-6)
    assert grad == pytest.approx([slope for _, slope in expected], rel=1e-6)
    assert metrics["nll"].tolist() == pytest.approx([0.2, 3.0, 7.5])


def distilled(config, lp, b, q, w):
    zeros = [0.0] * len(lp)
    return per_token(config, lp, b, ref_logprobs=q, ref_kl_weights=w, rl_weights=zeros)


@pytest.mark.parametrize("one_sided", [False, True])
@pytest.mark.parametrize(("name", "config", "options"), CASES)
def test_distillation_credit_follows_the_loss_or_the_fixed_rule(name, config, options, one_sided):
    config = type(config)(**{**vars(config), "ref_kl": "one_sided" if one_sided else "same"})
    rng = random.Random(name)
    ranges = ((-5, -0.01), (-5, -0.01), (-5, -0.01), (0.1, 3))
    lp, b, q, w = (f32(rng.uniform(*bounds) for _ in range(200)) for bounds in ranges)
    loss, grad, metrics = distilled(config, lp, b, q, w)
    rule, kwargs = (BY_NAME["one_sided"], {}) if one_sided else (BY_NAME[name], options)
    expected = [rule(li, bi, qi - li, wi, **kwargs) for li, bi, qi, wi in zip(lp, b, q, w, strict=True)]
    assert grad == pytest.approx([slope for _, slope in expected], rel=1e-6, abs=1e-9)
    size = math.fsum(abs(value) for value, _ in expected)
    assert loss == pytest.approx(math.fsum(value for value, _ in expected), abs=1e-6 * size)
    credit = [qi - li for qi, li in zip(q, lp, strict=True)]
    assert metrics["ref_kl"].tolist() == pytest.approx(credit, abs=1e-6)


def test_icepop_bounds_act_on_distillation_credit():
    """The ratio 10 leaves [0.2, 5]: no credit, though ipo and the fixed rule would keep the token."""
    lp, b, q = [math.log(0.01)], [math.log(0.001)], [math.log(0.5)]
    assert distilled(IcePopConfig(), lp, b, q, [1.0])[1] == [0.0]
    assert distilled(IpoConfig(), lp, b, q, [1.0])[1] != [0.0]
    assert distilled(IcePopConfig(ref_kl="one_sided"), lp, b, q, [1.0])[1] != [0.0]
    assert distilled(IcePopConfig(), lp, b, q, [1.0])[2]["ref_kl/is_masked"].tolist() == [1.0]


def test_the_fixed_rule_drops_on_one_side_only():
    down, up = ([math.log(0.1)], [math.log(0.5)]), ([math.log(0.5)], [math.log(0.1)])
    config = IpoConfig(ref_kl="one_sided")
    assert distilled(config, *down, [-0.1], [1.0])[1] == [0.0]
    assert distilled(config, *up, [-0.1], [1.0])[1] != [0.0]


# --- metrics of each loss ---------------------------------------------------------------------------


def test_trust_region_metrics_split_the_mismatch_by_what_was_kept():
    logprobs, behaviour, advantages = worked_inputs()
    _, _, metrics = per_token(IcePopConfig(), logprobs, behaviour, advantages=advantages)
    kl = torch.tensor([mismatch_kl(lp, b) for lp, b in zip(logprobs, behaviour, strict=True)])
    kept = torch.tensor([True, True, False, False, False, False])
    assert metrics["is_masked"].tolist() == [0, 0, 1, 1, 1, 1]
    for name, members in (("masked_mismatch_kl", ~kept), ("unmasked_mismatch_kl", kept)):
        assert metrics[name].isnan().tolist() == (~members).tolist()
        assert metrics[name][members].tolist() == pytest.approx(kl[members].tolist(), rel=1e-4)


def test_ppo_metrics_count_active_clips_and_capped_ratios():
    lp = [math.log(0.5), math.log(0.5), math.log(0.1), math.log(0.1), math.log(0.9)]
    b = [math.log(0.4), math.log(0.4), math.log(0.2), math.log(0.2), math.log(0.01)]
    _, _, metrics = per_token(PpoConfig(max_importance_ratio=50.0), lp, b, advantages=[1, -1, 1, -1, -1])
    assert metrics["is_clipped"].tolist() == [1, 0, 0, 1, 0]
    assert metrics["ratio_capped"].tolist() == [0, 0, 0, 0, 1]


def test_cispo_metrics_count_clipped_weights():
    lp, b = [-0.1, -0.1, -3.0], [-0.1, -3.0, -0.1]
    _, _, metrics = per_token(CispoConfig(ratio_low=0.5), lp, b, advantages=[1, 1, 1])
    assert metrics["is_clipped"].tolist() == [0, 1, 1]


# --- shared quantities at the edges -----------------------------------------------------------------


def test_probability_shift_keeps_its_digits_where_probabilities_are_close():
    lp, b = torch.tensor([-1e-6, -20.0, -0.5]), torch.tensor([-2e-6, -20.001, -0.5])
    expected = (lp.double().exp() - b.double().exp()).tolist()
    assert probability_shift(lp, b).tolist() == pytest.approx(expected, rel=1e-5)
    assert probability_shift(b, lp).tolist() == pytest.approx([-e for e in expected], rel=1e-5)


def test_capped_ratio_keeps_its_gradient_above_the_cap():
    d = torch.tensor([0.5, 3.0, 200.0], requires_grad=True)
    ratio = capped_ratio(d, math.log(10.0))
    ratio.sum().backward()
    assert ratio.tolist() == pytest.approx([math.exp(0.5), 10.0, 10.0])
    assert d.grad.tolist() == pytest.approx(ratio.tolist())


def test_mismatch_kl_stays_finite_and_never_negative():
    d = torch.tensor([-200.0, -1e-4, 0.0, 1e-4, 200.0])
    kl = prl_mismatch_kl(d)
    assert kl.tolist() == pytest.approx([199.0, 5e-9, 0.0, 5e-9, 1e30], rel=0.02)
    assert (kl >= 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("lp", "b"), [(-1e-7, -300.0), (-300.0, -1e-7), (-300.0, -300.5), (0.0, 0.0)])
@pytest.mark.parametrize("a", [1.0, -1.0])
def test_extreme_ratios_stay_finite(name, lp, b, a):
    loss, grad, metrics = per_token(LOSSES[name](), [lp], [b], advantages=[a])
    assert math.isfinite(loss) and math.isfinite(grad[0])
    assert metrics["mismatch_kl/all"].isfinite().all()
