"""Group credit against formulas written out in float64, and what must hold exactly."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from algo_builders import advantages, answer, episode, errored, group, trace, tree
from algo_builders import given as prompt
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.algo import build_algorithm
from prl.algo.credit import assign_advantage
from prl.config.algo import (
    GrpoConfig,
    HierarchicalGrpoConfig,
    LengthPenaltyConfig,
    MaxRlConfig,
    RaeConfig,
)


def forall(*strategies, **named):
    """Hypothesis without a deadline, so that a busy machine does not fail it, and 50 draws."""
    return lambda test: settings(deadline=None, max_examples=50)(given(*strategies, **named)(test))


rewards32 = st.floats(-4, 4, width=32)
groups32 = st.lists(rewards32, min_size=1, max_size=12)


def score(config, episodes):
    algorithm = build_algorithm(config, env="reverse_text")
    asyncio.run(algorithm.score_group(episodes))
    return advantages(episodes)


def close(found, expected, scale=1e-6):
    assert found == pytest.approx(expected, rel=scale, abs=1e-12)


# --- float64 references, from the formulas -----------------------------------------------------------


def grpo_reference(rewards):
    mean = sum(map(float, rewards)) / len(rewards)
    return [r - mean for r in rewards]


def penalised_reference(rewards, sampled, others, turns, wo, wn, wu):
    def share(values):
        return [v / max(1, max(values)) for v in values]

    p = [
        wo * a + wn * b + wu * c for a, b, c in zip(share(sampled), share(others), share(turns), strict=True)
    ]
    mean = sum(rewards) / len(rewards)
    return grpo_reference([r - mean * pi for r, pi in zip(rewards, p, strict=True)]), p


# --- worked vectors ---------------------------------------------------------------------------------


def test_grpo_vector():
    assert score(GrpoConfig(), group([1, 0, 1, 0])) == [0.5, -0.5, 0.5, -0.5]


def test_grpo_length_penalty_vector():
    sizes = zip([1, 0, 1, 0], [100, 50, 200, 80], [40, 40, 40, 60], [1, 1, 2, 1], strict=True)
    episodes = [episode(trace(r, sampled=o, prompt=n - 1, turns=u)) for r, o, n, u in sizes]
    found = score(GrpoConfig(length_penalty=LengthPenaltyConfig()), episodes)
    expected, p = penalised_reference(
        [1, 0, 1, 0], [100, 50, 200, 80], [40, 40, 40, 60], [1, 1, 2, 1], 0.25, 0.1, 0.1
    )
    assert p == pytest.approx([0.2416667, 0.1791667, 0.4166667, 0.25], abs=1e-7)
    close(found, expected)
    assert found == pytest.approx([0.5151042, -0.4536458, 0.4276042, -0.4890625], abs=1e-7)


def test_max_rl_vector():
    assert score(MaxRlConfig(), group([1, 0, 0, 0])) == [3, -1, -1, -1]


def test_rae_vector_and_final_baseline():
    algorithm = build_algorithm(RaeConfig(), env="reverse_text")
    episodes = group([1, 1, -1])
    asyncio.run(algorithm.score_group(episodes))
    close(advantages(episodes), [1, 0.95, -1.0975])
    assert algorithm.state_dict() == {"baselines": {"agent": pytest.approx(0.042625)}}


# --- references over random groups ------------------------------------------------------------------


@forall(groups32)
def test_grpo_matches_the_formula(rewards):
    expected = grpo_reference(rewards)
    found = score(GrpoConfig(), group(rewards))
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * max(map(abs, rewards)) + 1e-30)


@forall(
    st.lists(
        st.tuples(rewards32, st.integers(1, 40), st.integers(0, 40), st.integers(0, 9)),
        min_size=1,
        max_size=8,
    )
)
def test_length_penalty_matches_the_formula(members):
    rewards, sampled, prompts, turns = map(list, zip(*members, strict=True))
    episodes = [episode(trace(r, sampled=o, prompt=n, turns=u)) for r, o, n, u in members]
    config = GrpoConfig(length_penalty=LengthPenaltyConfig(output_tokens=0.3, input_tokens=0.7, turns=0.2))
    expected, _ = penalised_reference(rewards, sampled, [n + 1 for n in prompts], turns, 0.3, 0.7, 0.2)
    found = score(config, episodes)
    assert np.allclose(found, expected, rtol=1e-6, atol=1e-6 * max(map(abs, rewards)) + 1e-30)


@forall(st.lists(st.tuples(rewards32, st.integers(1, 50)), min_size=1, max_size=8))
def test_length_weighted_baseline_matches_the_formula(members):
    episodes = [episode(trace(r, sampled=o)) for r, o in members]
    baseline = sum(r * o for r, o in members) / sum(o for _, o in members)
    found = score(GrpoConfig(length_weighted_baseline=True), episodes)
    assert np.allclose(found, [r - baseline for r, _ in members], rtol=1e-6, atol=1e-5)


@forall(st.lists(st.floats(0, 4, width=32).filter(lambda r: r == 0 or r > 1e-3), min_size=1, max_size=8))
def test_max_rl_matches_the_formula(rewards):
    mean = math.fsum(rewards) / len(rewards)
    expected = [(r - mean) / mean if mean > 0 else 0.0 for r in rewards]
    assert np.allclose(score(MaxRlConfig(), group(rewards)), expected, rtol=1e-6, atol=1e-6)


def test_max_rl_gives_nothing_when_the_mean_is_not_positive():
    assert score(MaxRlConfig(), group([0, 0])) == [0, 0]
    assert score(MaxRlConfig(), group([-1, 0])) == [0, 0]


@forall(st.lists(st.tuples(st.sampled_from(["p0", "p1"]), rewards32), min_size=1, max_size=10))
def test_rae_keeps_one_baseline_per_agent_in_order_of_arrival(members):
    episodes = [episode(trace(r, agent=agent)) for agent, r in members]
    beta, expected = {"p0": 0.0, "p1": 0.0}, []
    for agent, r in members:
        expected.append(r - beta[agent])
        beta[agent] = 0.8 * beta[agent] + (1 - 0.8) * r
    assert np.allclose(score(RaeConfig(decay=0.8), episodes), expected, rtol=1e-6, atol=1e-9)


def test_rae_baselines_outlive_a_resume():
    before = build_algorithm(RaeConfig(), env="duel")
    asyncio.run(before.score_group(group([1, 1, -1])))
    after = build_algorithm(RaeConfig(), env="duel")
    after.load_state_dict(before.state_dict())
    episodes = group([1.0])
    asyncio.run(after.score_group(episodes))
    close(advantages(episodes), [1 - 0.042625])
    with pytest.raises(ValueError, match="baselines"):
        after.load_state_dict({"cursor": 3})


def test_rae_refuses_a_decay_outside_its_range():
    with pytest.raises(ValueError, match=r"algo\.decay=1\.0"):
        build_algorithm(RaeConfig(decay=1.0), env="duel")


def test_hierarchical_compares_solvers_in_their_episode_and_proposers_in_the_group():
    episodes = [
        episode(trace(0.5, agent="proposer"), trace(1, agent="solver"), trace(0, agent="solver")),
        episode(trace(1.0, agent="proposer"), trace(1, agent="solver"), trace(1, agent="solver")),
        episode(trace(0.0, agent="proposer"), trace(1, agent="solver")),
    ]
    found = score(HierarchicalGrpoConfig(), episodes)
    assert found == [0.0, 0.5, -0.5, 0.5, 0.0, 0.0, -0.5, 0.0]


def test_hierarchical_needs_an_agent():
    with pytest.raises(ValueError, match="episode_agents"):
        build_algorithm(HierarchicalGrpoConfig(episode_agents=[]), env="duel")


# --- what must hold exactly -------------------------------------------------------------------------

GROUP_RELATIVE = [
    GrpoConfig(),
    GrpoConfig(length_penalty=LengthPenaltyConfig()),
    GrpoConfig(length_weighted_baseline=True),
    MaxRlConfig(),
    HierarchicalGrpoConfig(),
    HierarchicalGrpoConfig(episode_agents=["agent"]),
]


@pytest.mark.parametrize("config", GROUP_RELATIVE, ids=lambda c: c.name)
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.95, 0.1, 1 / 3, -7.3])
def test_equal_rewards_give_exactly_zero(config, reward):
    for size in (1, 2, 3, 5, 7, 8, 12, 16):
        assert score(config, group([reward] * size)) == [0.0] * size


def test_equal_rewards_give_exactly_zero_whatever_the_lengths():
    episodes = [episode(trace(0.95, sampled=n)) for n in (3, 17, 250, 4093)]
    assert score(GrpoConfig(length_weighted_baseline=True), episodes) == [0.0] * 4


def test_rewards_that_differ_by_rounding_only_are_equal():
    assert score(GrpoConfig(), group([0.1 + 0.2, 0.3, 0.3])) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("config", GROUP_RELATIVE[:4], ids=lambda c: c.name)
@forall(data=st.data())
def test_a_permuted_group_gets_permuted_advantages(config, data):
    members = data.draw(st.lists(st.tuples(rewards32, st.integers(1, 30)), min_size=2, max_size=8))
    order = data.draw(st.permutations(range(len(members))))
    plain = score(config, [episode(trace(r, sampled=o)) for r, o in members])
    permuted = score(config, [episode(trace(*members[i][:1], sampled=members[i][1])) for i in order])
    assert permuted == [plain[i] for i in order]


@forall(groups32, st.integers(-64, 64))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, constant):
    rewards = [round(r * 64) / 64 for r in rewards]  # so that the sums are exact in float32
    assert score(GrpoConfig(), group([r + constant for r in rewards])) == score(GrpoConfig(), group(rewards))


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
@pytest.mark.parametrize("config", [GrpoConfig(), MaxRlConfig(), RaeConfig(), HierarchicalGrpoConfig()])
def test_traces_without_a_number_are_left_out_of_the_baseline(config, reward):
    clean = group([1, 0.5])
    expected = score(config, group([1, 0.5]))
    found = score(config, [*clean, episode(trace(reward)), episode(errored(1.0))])
    assert found == [*expected, None, None]


def test_untrainable_agents_and_traces_without_samples_are_left_out():
    fixed, silent = trace(0.0, agent="referee"), trace(0.0, sampled=0)
    fixed.agent_trainable = False
    assert score(GrpoConfig(), [*group([1, 0]), episode(fixed, silent)]) == [0.5, -0.5, None, None]


def test_grpo_pools_all_agents_of_a_group():
    assert score(GrpoConfig(), [episode(trace(1, agent="a"), trace(0, agent="b"))]) == [0.5, -0.5]


# --- weights of prompt aggregation and the assignment itself ----------------------------------------


def test_prompt_aggregation_weighs_every_prompt_equally():
    episodes = [episode(trace(1, sampled=3)), episode(trace(0, sampled=7)), episode(errored())]
    score(GrpoConfig(loss_aggregation="prompt"), episodes)
    weights = [w for ep in episodes for node in ep.traces[0].nodes for w in node.loss_weights.get("rl", [])]
    assert weights == [0.0] + [0.1] * 3 + [0.0] + [0.1] * 7
    assert sum(weights) == pytest.approx(1.0)


def test_token_aggregation_writes_no_stream():
    episodes = group([1, 0])
    score(GrpoConfig(), episodes)
    assert all(not node.loss_weights for ep in episodes for node in ep.traces[0].nodes)


def test_a_list_of_advantages_goes_to_the_sampled_tokens_in_order():
    two_turns = tree([prompt(2), answer(2), prompt(1, "tool", 1), answer(1, parent=2)], [[0, 1, 2, 3]])
    assign_advantage(two_turns, [1.0, 2.0, 3.0])
    assert [node.advantages for node in two_turns.nodes] == [None, [1.0, 2.0], None, [3.0]]
    with pytest.raises(ValueError, match="2 advantages for 3 sampled tokens"):
        assign_advantage(two_turns, [1.0, 2.0])


def test_a_mask_that_does_not_fit_its_node_is_an_error():
    broken = trace()
    broken.nodes[1].mask.append(True)
    with pytest.raises(ValueError, match=broken.id):
        assign_advantage(broken, 1.0)
