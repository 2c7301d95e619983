"""The sum of the three components: denominators, independence, invariance, and values that are not finite."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st
from loss_builders import f32, joined, random_samples, row, run, sample
from loss_reference import BY_NAME, cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from prl.config.loss import CispoConfig, IcePopConfig, IpoConfig, LossConfig, PpoConfig
from prl.loss.batch import from_micro_batch
from prl.loss.components import compute_loss, count_members

CONFIGS = [IpoConfig(), IcePopConfig(), PpoConfig(), CispoConfig(), IpoConfig(ref_kl="one_sided")]
by_loss = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.name}-{c.ref_kl}")


def learner(samples, seed=0):
    """Learner logprobs of each sample, near the behaviour's."""
    rng = random.Random(seed)
    return [
        f32(b - rng.uniform(0, 0.4) if m else -1.0 for b, m in zip(s.logprobs, s.mask, strict=True))
        for s in samples
    ]


def reference_gradient(samples, logprobs, config):
    """(loss, slopes per sample and token) of the whole batch, by the formulas."""
    rule = BY_NAME[config.name]
    distil = rule if config.ref_kl == "same" else BY_NAME[config.ref_kl]
    sums, slopes, counts = {}, [[0.0] * len(s) for s in samples], {"rl": 0.0, "ce": 0.0, "ref_kl": 0.0}
    for i, s in enumerate(samples):
        for t in range(len(s)):
            lp, b = logprobs[i][t], s.logprobs[t]
            weights = {
                "rl": (s.rl_weights[t] if s.rl_weights else 1.0) if s.mask[t] else 0.0,
                "ce": s.ce_weights[t] if s.ce_weights else 0.0,
                "ref_kl": s.ref_kl_weights[t] if s.ref_kl_weights else 0.0,
            }
            for name, w in weights.items():
                if w == 0:
                    continue
                counts[name] += w if name == "rl" else 1
                if name == "ce":
                    value, slope = cross_entropy(lp, w)
                elif name == "rl":
                    value, slope = rule(lp, b, s.advantages[t], w)
                else:
                    value, slope = distil(lp, b, s.ref_logprobs[t] - lp, w)
                sums.setdefault(name, []).append((value, i, t, slope))
    total = 0.0
    for name, terms in sums.items():
        for value, i, t, slope in terms:
            total += value / counts[name]
            slopes[i][t] += slope / counts[name]
    return total, slopes


# --- denominators -----------------------------------------------------------------------------------


@by_loss
def test_each_component_is_divided_by_its_own_global_count(config):
    samples = random_samples(seed=1)
    logprobs = learner(samples)
    loss, grads, _ = run([row([s]) for s in samples], logprobs, config)
    expected, slopes = reference_gradient(samples, logprobs, config)
    assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
    for grad, slope in zip(grads, slopes, strict=True):
        assert grad == pytest.approx(slope, rel=1e-6, abs=1e-9)


def test_counts_are_members_and_for_rl_the_sum_of_weights():
    samples = [
        sample([-1, -1], advantages=[1, 1], rl_weights=[0.25, 0.0]),
        sample([-1, -1, -1], advantages=[1, 1, 1]),
        sample([-1], ce_weights=[0.1], rl_weights=[0.0]),
        sample([-1, -1], ref_kl_weights=[1.0, 0.5], ref_logprobs=[-1, -1], rl_weights=[0, 0]),
    ]
    assert count_members(from_micro_batch(row(samples, padding=3))) == {"rl": 3.25, "ce": 1.0, "ref_kl": 2.0}


def test_ce_and_ref_kl_do_not_consult_the_mask():
    context = sample([-1.0, -2.0], ce_weights=[0.5, 0.0], ref_kl_weights=[0.0, 1.0], ref_logprobs=[0.0, -1.0])
    context.mask = [False] * 3
    context.logprobs = [0.0] * 3
    micro = from_micro_batch(row([context]))
    assert count_members(micro) == {"rl": 0.0, "ce": 1.0, "ref_kl": 1.0}
    assert micro.policy["all"].tolist() == []


def test_prompt_aggregation_gives_every_prompt_the_same_say():
    """Prompts of 1 and 4 tokens with weights 1/T: N_R is 2, each contributes the mean of its tokens."""
    short = sample([-1.0], advantages=[1.0], rl_weights=[1.0])
    long = sample([-1.0] * 4, advantages=[1.0] * 4, rl_weights=[0.25] * 4)
    logprobs = [[0.0, -1.0], [0.0, -1.0, -1.0, -1.0, -1.0]]
    loss, (first, second), _ = run([row([short]), row([long])], logprobs, IpoConfig())
    assert loss == pytest.approx(-1.0)
    assert first[1] == pytest.approx(-0.5) and second[1:] == pytest.approx([-0.125] * 4)


@by_loss
def test_a_row_without_members_runs_backward_with_no_gradient(config):
    empty = sample([-1.0, -2.0], advantages=[1.0, 1.0])
    empty.mask = [False] * 3
    loss, (grad,), (metrics,) = run([row([empty], padding=2)], [[-1.0] * 5], config)
    assert (loss, grad, metrics) == (0.0, [0.0] * 5, {})


# --- independence of the components -----------------------------------------------------------------


@by_loss
@settings(deadline=None, max_examples=30)
@forall(seed=st.integers(0, 10_000), other=st.sampled_from(["ce", "ref_kl"]))
def test_tokens_of_another_component_leave_the_rl_gradient_unchanged(config, seed, other):
    rl, others = (
        random_samples(seed, kinds=("rl",), count=4),
        random_samples(seed + 1, kinds=(other,), count=3),
    )
    alone = run([row(rl)], [joined(learner(rl))], config)[1][0]
    mixed = run([row(rl + others)], [joined(learner(rl) + learner(others))], config)[1][0]
    assert mixed[: len(alone)] == alone
    assert any(mixed[len(alone) :])


def test_echo_adds_its_ce_gradient_to_an_unchanged_rl_gradient():
    rl = sample([-1.0, -2.0], advantages=[1.0, -1.0])
    both = sample([-1.0, -2.0], prompt=3, advantages=[1.0, -1.0])
    both.ce_weights = [0.0, 0.1, 0.1, 0.0, 0.0]
    _, (plain,), _ = run([row([rl])], [[0.0, -1.1, -2.1]], IpoConfig())
    _, (mixed,), _ = run([row([both])], [[0.0, -5.0, -6.0, -1.1, -2.1]], IpoConfig())
    assert mixed[3:] == plain[1:]
    assert mixed[:3] == pytest.approx([0.0, -0.05, -0.05])


# --- packing does not matter ------------------------------------------------------------------------


class TinyPolicy(torch.nn.Module):
    """Logprob of each token given the one before it within its sequence, at its temperature."""

    def __init__(self, vocabulary=24, width=8):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embed = torch.nn.Parameter(torch.randn(vocabulary, width, generator=generator))
        self.head = torch.nn.Parameter(torch.randn(vocabulary, width, generator=generator))

    def forward(self, micro):
        ids = micro.input_ids
        logits = self.embed[ids] @ self.head.T / micro.temperatures[:, None]
        logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        return torch.cat([logprobs.new_zeros(1), logprobs])


def model_gradient(rows, config, ranks=1):
    """Gradient and loss of a batch cut into these rows, spread over ranks that each sum their own."""
    micros = [from_micro_batch(micro) for micro in rows]
    counts = [count_members(micro) for micro in micros]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    gradients, loss_sum = [], 0.0
    for rank in range(ranks):
        policy = TinyPolicy()
        for micro in micros[rank::ranks]:
            loss, _ = compute_loss(micro, policy(micro), total, config)
            loss.backward()
            loss_sum += loss.item()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    return torch.stack(gradients).sum(0), loss_sum


@by_loss
def test_rows_micro_batches_and_ranks_leave_the_gradient_unchanged(config):
    samples = random_samples(seed=5, count=12)
    for i, s in enumerate(samples):
        s.token_ids = [(7 * i + 3 * t) % 24 for t in range(len(s))]
        s.temperatures = [0.7 + 0.1 * i] * len(s)
    whole, loss = model_gradient([row(samples)], config)
    assert whole.abs().max() > 1e-3
    layouts = {
        "one a row": ([[s] for s in samples], 0, 1),
        "pairs, padded": ([samples[i : i + 2] for i in range(0, 12, 2)], 3, 1),
        "other order": ([samples[::-1]], 0, 1),
        "uneven rows": ([samples[:1], samples[1:4], samples[4:]], 0, 1),
        "two ranks": ([[s] for s in samples], 2, 2),
    }
    for name, (rows, padding, ranks) in layouts.items():
        found, value = model_gradient([row(r, padding) for r in rows], config, ranks)
        assert torch.allclose(found, whole, rtol=1e-5, atol=1e-5 * float(whole.abs().max())), name
        assert value == pytest.approx(loss, rel=1e-5), name


# --- values that are not finite ---------------------------------------------------------------------

BAD = [math.nan, math.inf, -math.inf]


@by_loss
@settings(deadline=None, max_examples=30)
@forall(data=st.data(), bad=st.sampled_from(BAD))
def test_whatever_stands_at_a_masked_place_changes_nothing(config, data, bad):
    samples = random_samples(seed=2)
    logprobs = joined(learner(samples))
    micro = row(samples, padding=2)
    free = [i for i, m in enumerate(micro.loss_mask) if not m]
    loss, (clean,), (metrics,) = run([micro], [[*logprobs, 0.0, 0.0]], config)
    spoiled = [*logprobs, 0.0, 0.0]
    for i in data.draw(st.lists(st.sampled_from(free), min_size=1)):
        spoiled[i] = bad
        for stream in ("advantages", "inference_logprobs", "ref_logprobs"):
            getattr(micro, stream)[i] = bad
    again, (gradient,), (found,) = run([micro], [spoiled], config)
    assert (again, gradient) == (loss, clean)
    assert {name: values.nan_to_num(-7.0).tolist() for name, values in found.items()} == {
        name: values.nan_to_num(-7.0).tolist() for name, values in metrics.items()
    }


@by_loss
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["rl", "ce", "ref_kl"])
def test_a_bad_learner_logprob_names_the_sample_and_the_token(config, bad, kind):
    samples = [sample([-1.0] * 3, advantages=[1.0] * 3, trace_id="good"), *random_samples(4, (kind,), 1)]
    logprobs = learner(samples)
    logprobs[1][samples[1].mask.index(True)] = bad
    message = rf"trace 't0', token {samples[1].mask.index(True)} of its sample: the trainer's logprob"
    with pytest.raises(ValueError, match=message):
        run([row(samples)], [joined(logprobs)], config)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        ("inference_logprobs", "rl"),
        ("inference_logprobs", "ref_kl"),
        ("advantages", "rl"),
        ("ref_logprobs", "ref_kl"),
        ("rl_weights", "rl"),
        ("ce_weights", "ce"),
        ("ref_kl_weights", "ref_kl"),
    ],
)
def test_a_bad_value_of_a_member_is_found_before_the_forward_pass(bad, stream, kind):
    first = sample([-1.0, -1.0], advantages=[1.0, 1.0], rl_weights=[1.0, 1.0])
    micro = row([first, *random_samples(4, (kind,), 1)])
    position = micro.sequence_lengths[0] + micro.loss_mask[micro.sequence_lengths[0] :].index(True)
    getattr(micro, stream)[position] = bad
    token = position - micro.sequence_lengths[0]
    with pytest.raises(ValueError, match=f"trace 't0', token {token} of its sample: {stream} is"):
        from_micro_batch(micro)


def test_a_loss_that_overflows_names_the_sample():
    one = sample([-1.0, -1.0], advantages=[1.0, 3e38], trace_id="huge")
    with pytest.raises(ValueError, match=r"trace 'huge', token 2 .*the rl loss is -inf"):
        run([row([one])], [[0.0, -1.0, 0.0]], IpoConfig(eps=1.0))


def test_ref_kl_without_reference_logprobs_names_who_provides_them():
    one = sample([-1.0], ref_kl_weights=[1.0], rl_weights=[0.0], trace_id="lost")
    with pytest.raises(ValueError, match=r"trace 'lost', token 1.*opd and opsd"):
        from_micro_batch(row([one]))


@pytest.mark.parametrize("stream", ["mask", "ce_weights", "ref_kl_weights"])
def test_the_first_token_of_a_sequence_must_not_be_a_member(stream):
    second = sample([-1.0], advantages=[0.0], ce_weights=[0.0], ref_kl_weights=[0.0], ref_logprobs=[0.0])
    getattr(second, stream)[0] = True if stream == "mask" else 1.0
    with pytest.raises(AssertionError, match="first token"):
        from_micro_batch(row([sample([-1.0], advantages=[1.0]), second]))


# --- metrics and the rest ---------------------------------------------------------------------------


def test_metrics_are_split_by_environment():
    samples = [
        sample([-1.0, -1.0], env="gsm8k", advantages=[1.0, 1.0]),
        sample([-1.0], env="tools", advantages=[1.0]),
        sample([-1.0, -1.0], env="chat", ce_weights=[1.0, 1.0], rl_weights=[0.0, 0.0]),
        sample([-1.0], env="tools", ref_kl_weights=[1.0], ref_logprobs=[-0.5], rl_weights=[0.0]),
    ]
    micro = row(samples, padding=2)
    logprobs = [0.0, -1.1, -1.2, 0.0, -1.3, 0.0, -5.0, -5.0, 0.0, -1.4, 0.0, 0.0]
    _, _, (metrics,) = run([micro], [logprobs], IpoConfig())
    k = {d: math.exp(-d) + d - 1 for d in (0.1, 0.2, 0.3, 0.4)}
    assert metrics["mismatch_kl/all"].tolist() == pytest.approx(list(k.values()), rel=1e-4)
    assert metrics["mismatch_kl/gsm8k"].tolist() == pytest.approx([k[0.1], k[0.2]], rel=1e-4)
    assert metrics["mismatch_kl/tools"].tolist() == pytest.approx([k[0.3], k[0.4]], rel=1e-4)
    assert "mismatch_kl/chat" not in metrics
    assert metrics["nll"].tolist() == [5.0, 5.0]
    assert metrics["ref_kl"].tolist() == pytest.approx([0.9])
    assert metrics["is_masked"].tolist() == [0.0] * 3 and metrics["ref_kl/is_masked"].tolist() == [0.0]
    tensors = from_micro_batch(micro)
    sampled = {env: positions.tolist() for env, positions in tensors.sampled.items()}
    assert sampled == {"all": [1, 2, 4, 6, 7, 9], "chat": [6, 7], "gsm8k": [1, 2], "tools": [4, 9]}


def test_the_loss_of_each_token_is_told_before_the_division():
    """Weighted, of all components: rl -A at the behaviour's own logprobs, ce -w l, ref_kl -(q - l)."""
    samples = [
        sample([-1.0, -1.0], advantages=[2.0, -3.0], rl_weights=[1.0, 0.5]),
        sample([-1.0, -1.0], ce_weights=[1.0, 0.25], rl_weights=[0.0, 0.0]),
        sample([-1.0], ref_kl_weights=[1.0], ref_logprobs=[-0.5], rl_weights=[0.0]),
    ]
    micro = row(samples, padding=2)
    logprobs = [0.0, -1.0, -1.0, 0.0, -5.0, -4.0, 0.0, -1.0, 0.0, 0.0]
    whole, _, (metrics,) = run([micro], [logprobs], PpoConfig())
    terms = [-2.0, 0.5 * 3.0, 5.0, 0.25 * 4.0, -0.5]
    assert metrics["loss"].tolist() == pytest.approx(terms)
    assert whole == pytest.approx(sum(terms[:2]) / 1.5 + sum(terms[2:4]) / 2 + terms[4])


def test_metrics_carry_no_gradient():
    leaf = torch.full((12,), -1.0, requires_grad=True)
    samples = [
        sample([-1.0, -1.0], advantages=[1.0, 1.0]),
        sample([-1.0, -1.0], ce_weights=[1.0, 1.0], rl_weights=[0.0, 0.0]),
        *[sample([-1.0, -2.0], ref_kl_weights=[1.0, 1.0], ref_logprobs=[-0.5, -1], rl_weights=[0.0, 0.0])]
        * 2,
    ]
    micro = from_micro_batch(row(samples))
    for config in CONFIGS:
        _, metrics = compute_loss(micro, leaf, count_members(micro), config)
        assert len(metrics) >= 5
        assert not any(values.requires_grad for values in metrics.values())
        assert all(values.dim() == 1 for values in metrics.values())


class DeviceWaits(TorchDispatchMode):
    """Names of the operations that would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        by_mask = name == "index" and any(index.dtype == torch.bool for index in args[1])
        if by_mask or name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            self.names.append(name)
        return func(*args, **kwargs or {})


@by_loss
def test_the_loss_waits_for_the_device_once(config):
    micro = from_micro_batch(row(random_samples(seed=6), padding=1))
    leaf = torch.full((len(micro),), -1.0, requires_grad=True)
    with DeviceWaits() as waits:
        loss, _ = compute_loss(micro, leaf, count_members(micro), config)
        loss.backward()
    assert waits.names == ["_local_scalar_dense"]


def test_the_loss_is_taken_in_float32():
    one = from_micro_batch(row([sample([-1.0], advantages=[1.0])]))
    loss, _ = compute_loss(
        one, torch.tensor([0.0, -1.0], dtype=torch.bfloat16), {"rl": 1, "ce": 0, "ref_kl": 0}, IpoConfig()
    )
    assert loss.dtype == torch.float32


def test_an_unknown_loss_is_named():
    one = from_micro_batch(row([sample([-1.0], advantages=[1.0])]))
    with pytest.raises(ValueError, match=r"loss\.name='grpo' is unknown; choose one of ipo"):
        compute_loss(one, torch.zeros(2), count_members(one), LossConfig(name="grpo"))
