"""Traces to samples: branches, routing, pruning, truncation."""

from __future__ import annotations

import logging
import math

import pytest
from algo_builders import answer, given, trace, tree
from hypothesis import given as forall
from hypothesis import settings
from hypothesis import strategies as st

from prl.algo.credit import assign_advantage, weigh_sampled
from prl.algo.samples import build_samples
from prl.records import TrainSample


def build(one, action_loss="rl", **fields):
    settings = {"env": "tools", "temperature": 0.7, "seq_len": 100} | fields
    return build_samples(one, action_loss=action_loss, **settings)


def forked(reward=1.0):
    """prompt(2) - answer(1+2) - two tool results, each with its own answer."""
    nodes = [
        given(2),
        answer(2),
        given(1, "tool", 1),
        answer(1, parent=2),
        given(2, "tool", 1),
        answer(2, parent=4),
    ]
    return tree(nodes, [[0, 1, 2, 3], [0, 1, 4, 5]], reward)


# --- branches ---------------------------------------------------------------------------------------


def test_one_branch_becomes_one_sample_of_equal_lists():
    one = trace(sampled=2, prompt=2)
    assign_advantage(one, 0.5)
    built = build(one)
    assert built.truncated == 0
    assert built.samples == [
        TrainSample(
            token_ids=[10, 11, 50, 51, 52],
            mask=[False, False, False, True, True],
            logprobs=[0.0, 0.0, 0.0, -0.1, -0.2],
            temperatures=[0.7] * 5,
            env="tools",
            trace_id=one.id,
            advantages=[0.0, 0.0, 0.0, 0.5, 0.5],
        )
    ]


def test_a_shared_sampled_node_trains_once_and_is_context_later():
    one = forked()
    assign_advantage(one, [1.0, 2.0, 3.0, 4.0, 5.0])
    first, second = build(one).samples
    assert first.mask == [False] * 3 + [True] * 2 + [False] * 2 + [True]
    assert second.mask == [False] * 3 + [False] * 2 + [False] * 3 + [True] * 2
    assert first.advantages == [0, 0, 0, 1, 2, 0, 0, 3]
    assert second.advantages == [0, 0, 0, 0, 0, 0, 0, 0, 4, 5]
    assert second.logprobs[3:5] == [0.0, 0.0]
    assert second.token_ids[:5] == first.token_ids[:5]


def test_a_weight_stream_counts_once_per_node():
    one = forked()
    one.nodes[0].loss_weights["ce"] = [0.0, 0.2]
    one.nodes[4].loss_weights["ce"] = [0.3, 0.4]
    assign_advantage(one, 1.0)
    first, second = build(one).samples
    assert first.ce_weights == [0, 0.2, 0, 0, 0, 0, 0, 0]
    assert second.ce_weights == [0, 0, 0, 0, 0, 0.3, 0.4, 0, 0, 0]


def test_a_branch_that_adds_nothing_is_not_emitted_and_takes_nothing():
    """The first branch has no token to train: its prompt must stay available to the second."""
    nodes = [given(2), given(2, parent=0), answer(2)]
    nodes[0].loss_weights["ce"] = [0.0, 0.0]
    nodes[2].loss_weights["ce"] = [0.5, 0.0, 0.0]
    one = tree(nodes, [[0, 1], [0, 2], [0, 2]])
    assign_advantage(one, 1.0)
    built = build(one)
    assert len(built.samples) == 1
    assert built.samples[0].ce_weights == [0, 0, 0.5, 0, 0]


def test_a_branch_with_weights_but_no_sampled_token_of_its_own_is_emitted():
    nodes = [given(1), answer(1), given(2, "tool", 1)]
    nodes[2].loss_weights["ce"] = [0.1, 0.1]
    one = tree(nodes, [[0, 1], [0, 1, 2]])
    assign_advantage(one, 1.0)
    _, tail = build(one).samples
    assert not any(tail.mask) and tail.ce_weights == [0, 0, 0, 0.1, 0.1]


def test_a_trace_without_trainable_tokens_warns(caplog):
    one = tree([given(3)], [[0]])
    with caplog.at_level(logging.WARNING):
        assert build(one).samples == []
    assert one.id in caplog.text


def test_the_first_token_of_a_sample_never_enters_the_loss():
    """Even where a trace starts with a sampled token or a weighted one."""
    node = answer(3, scaffold=0, parent=None)
    node.loss_weights["ce"] = [0.5, 0.5, 0.0]
    one = tree([node], [[0]])
    assign_advantage(one, 1.0)
    (sample,) = build(one).samples
    assert sample.mask == [False, True, True]
    assert (sample.logprobs[0], sample.advantages[0], sample.ce_weights) == (0.0, 0.0, [0.0, 0.5, 0.0])


@settings(deadline=None)
@forall(data=st.data())
def test_every_sampled_token_of_any_tree_trains_exactly_once(data):
    nodes, leaves = [given(1)], {0}
    for i in range(1, data.draw(st.integers(2, 9))):
        parent = data.draw(st.integers(0, i - 1))
        make = data.draw(st.sampled_from([answer, given]))
        nodes.append(make(data.draw(st.integers(1, 3)), parent=parent))
        leaves = (leaves - {parent}) | {i}
    one = tree(nodes, [path_to(nodes, leaf) for leaf in sorted(leaves)])
    assign_advantage(one, [float(i + 1) for i in range(one.num_sampled)])
    samples = build(one).samples
    trained = [a for s in samples for a, m in zip(s.advantages or [], s.mask, strict=False) if m]
    assert sorted(trained) == [float(i + 1) for i in range(one.num_sampled)]
    for sample in samples:
        assert len({len(sample.mask), len(sample.logprobs), len(sample.temperatures), len(sample)}) == 1


def path_to(nodes, leaf):
    path = []
    while leaf is not None:
        path.append(leaf)
        leaf = nodes[leaf].parent
    return path[::-1]


# --- routing ----------------------------------------------------------------------------------------


def test_rl_writes_no_stream():
    one = trace()
    assign_advantage(one, 1.0)
    (sample,) = build(one).samples
    assert (sample.rl_weights, sample.ce_weights, sample.ref_kl_weights) == (None, None, None)


def test_rl_keeps_the_weights_of_its_algorithm():
    one = trace(sampled=2)
    assign_advantage(one, 1.0)
    weigh_sampled(one, "rl", 0.25)
    (sample,) = build(one).samples
    assert sample.rl_weights == [0, 0, 0, 0.25, 0.25]


def test_a_message_without_weights_of_its_own_keeps_weight_one():
    one = forked()
    one.nodes[1].loss_weights["rl"] = [0.0, 0.5, 0.5]
    assign_advantage(one, 1.0)
    first, second = build(one).samples
    assert first.rl_weights == [0, 0, 0, 0.5, 0.5, 0, 0, 1]
    assert second.rl_weights == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_a_stream_of_zeros_is_absent():
    one = trace()
    one.nodes[0].loss_weights |= {"ce": [0.0, 0.0], "ref_kl": [0.0, 0.0]}
    assign_advantage(one, 1.0)
    (sample,) = build(one).samples
    assert sample.ce_weights is None and sample.ref_kl_weights is None


def test_ce_trains_sampled_tokens_with_weight_one_and_keeps_other_weights():
    one = forked()
    one.nodes[2].loss_weights["ce"] = [0.3]
    for node in one.nodes:
        node.logprobs = []  # a frozen teacher does not report its own
    first, second = build(one, "ce").samples
    assert first.ce_weights == [0, 0, 0, 1, 1, 0.3, 0, 1]
    assert first.rl_weights == [0.0] * 8
    assert first.logprobs == [0.0] * 8
    assert second.ce_weights == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert first.advantages is None


def test_ref_kl_trains_sampled_tokens_against_their_reference():
    one = trace(sampled=2)
    one.nodes[1].ref_logprobs = [-0.5, -0.6]
    (sample,) = build(one, "ref_kl").samples
    assert sample.ref_kl_weights == [0, 0, 0, 1, 1]
    assert sample.rl_weights == [0.0] * 5
    assert sample.ref_logprobs == [0, 0, 0, -0.5, -0.6]
    assert sample.advantages is None


# --- pruning ----------------------------------------------------------------------------------------


def test_a_trace_without_credit_is_pruned():
    one = trace()
    assign_advantage(one, 0.0)
    assert build(one).samples == []


def test_tokens_without_credit_leave_the_component():
    one = trace(sampled=4)
    assign_advantage(one, [0.0, 0.1, -0.2, 0.3])
    (exact,) = build(one).samples
    assert exact.rl_weights == [0, 0, 0, 0, 1, 1, 1]
    (bounded,) = build(one, min_abs_advantage=0.2).samples
    assert bounded.rl_weights == [0, 0, 0, 0, 0, 0, 1]


def test_pruning_keeps_a_sample_that_another_component_trains():
    one = trace()
    one.nodes[0].loss_weights["ce"] = [0.0, 0.1]
    assign_advantage(one, 0.0)
    (sample,) = build(one).samples
    assert sample.rl_weights == [0.0] * 6 and sample.ce_weights == [0, 0.1, 0, 0, 0, 0]


def test_pruning_keeps_the_weights_of_prompt_aggregation():
    one = trace(sampled=2)
    assign_advantage(one, [0.0, 1.0])
    weigh_sampled(one, "rl", 0.25)
    (sample,) = build(one).samples
    assert sample.rl_weights == [0, 0, 0, 0, 0.25]


def test_samples_without_advantages_are_never_pruned():
    one = trace()
    one.nodes[1].ref_logprobs = [-0.1] * 3
    (sample,) = build(one, "ref_kl", min_abs_advantage=100.0).samples
    assert sample.ref_kl_weights == [0, 0, 0, 1, 1, 1]


# --- truncation -------------------------------------------------------------------------------------


def test_a_long_sample_loses_its_tail_in_every_list_and_is_counted():
    one = trace(sampled=4)
    one.nodes[1].ref_logprobs = [-1.0] * 4
    built = build(one, "ref_kl", seq_len=5)
    (sample,) = built.samples
    assert built.truncated == 1
    assert (sample.mask, sample.ref_kl_weights) == ([False] * 3 + [True] * 2, [0, 0, 0, 1, 1])
    for name in ("token_ids", "mask", "logprobs", "temperatures", "ref_logprobs", "rl_weights"):
        assert len(getattr(sample, name)) == 5
    assert sample.advantages is None


def test_a_sample_that_fits_is_not_touched():
    one = trace()
    assign_advantage(one, 1.0)
    built = build(one, seq_len=6)
    assert built.truncated == 0 and len(built.samples[0]) == 6


def test_a_sample_whose_tokens_were_all_cut_is_dropped_and_counted():
    one = trace(prompt=5)
    assign_advantage(one, 1.0)
    built = build(one, seq_len=4)
    assert (built.samples, built.truncated) == ([], 1)


# --- errors -----------------------------------------------------------------------------------------


def break_mask(one):
    one.nodes[1].mask.pop()


def break_logprobs(one):
    one.nodes[1].logprobs.pop()


def break_advantages(one):
    one.nodes[1].advantages = [1.0]


def break_reference(one):
    one.nodes[1].ref_logprobs = [1.0]


def break_weights(one):
    one.nodes[0].loss_weights["ce"] = [1.0]


def break_stream_name(one):
    one.nodes[0].loss_weights["kl"] = [1.0, 1.0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_mask, "3 mask, 4 are needed"),
        (break_logprobs, "2 logprobs, 3 are needed"),
        (break_advantages, "1 advantages, 3 are needed"),
        (break_reference, "1 ref_logprobs, 3 are needed"),
        (break_weights, "1 ce weights, 2 are needed"),
        (break_stream_name, "unknown loss component 'kl'"),
    ],
)
def test_lists_that_do_not_fit_name_the_trace(damage, message):
    one = trace(sampled=3)
    assign_advantage(one, 1.0)
    damage(one)
    with pytest.raises(ValueError, match=f"{one.id}.*{message}"):
        build(one)


def test_missing_advantages_are_an_error():
    one = trace()
    with pytest.raises(ValueError, match=f"{one.id}.*without advantages"):
        build(one)


def test_missing_reference_logprobs_are_an_error():
    one = trace()
    with pytest.raises(ValueError, match=f"{one.id}.*without reference logprobs.*opd"):
        build(one, "ref_kl")


def test_a_trace_scored_in_part_is_an_error():
    one = forked()
    one.nodes[1].advantages = [1.0, 1.0]
    with pytest.raises(ValueError, match=f"{one.id}: some sampled messages were scored"):
        build(one)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_the_learner_cannot_divide_by_is_refused(temperature):
    with pytest.raises(ValueError, match=r"env\.tools: temperature="):
        build(trace(), temperature=temperature)


def test_an_advantage_that_is_not_a_number_is_not_pruned_away():
    one = trace(sampled=1)
    assign_advantage(one, math.nan)
    assert len(build(one).samples) == 1
