"""From traces to gradients: algorithms, samples and losses joined, with real packing in between."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from prl.algo import build_algorithm
from prl.algo.samples import build_samples
from prl.config.algo import EchoConfig, GrpoConfig, OpdConfig, SftAlgoConfig
from prl.config.loss import IpoConfig
from prl.loss.batch import from_micro_batch
from prl.loss.components import compute_loss, count_members
from prl.orchestrator.cost import RowCost
from prl.orchestrator.packing import pack_batch
from prl.records import Episode, Node, Trace


class Teacher:
    async def score(self, token_ids, cache_salt=None):
        return [0.0] + [-0.5] * (len(token_ids) - 1)


def message(parent, role, tokens, sampled=False):
    mask = [sampled] * tokens
    return Node(parent, role, sampled, list(range(tokens)), mask, [-1.0] * sum(mask))


def rollout(trace_id, reward, nodes, branches):
    trace = Trace(id=trace_id, agent="agent", nodes=nodes, branches=branches, reward=reward)
    return Episode(f"episode-{trace_id}", "env", "group", "task", {}, [trace])


def line(trace_id, reward, tokens):
    nodes = [message(None, "user", 2), message(0, "assistant", tokens, True)]
    return rollout(trace_id, reward, nodes, [[0, 1]])


def samples_of(config, env, episodes):
    algorithm = build_algorithm(config, env=env, teacher=Teacher())

    async def score():
        for episode in episodes:
            await algorithm.score_episode(episode)
        await algorithm.score_group(episodes)

    asyncio.run(score())
    return [
        sample
        for episode in episodes
        for trace in episode.traces
        for sample in build_samples(
            trace, env=env, action_loss=algorithm.action_loss, temperature=1.0, seq_len=64
        ).samples
    ]


def gradients(samples, seq_len=16):
    """{trace id: gradient by the logprobs of its trained tokens}, the learner at -1 everywhere."""
    (rows,) = pack_batch(samples, ranks=1, seq_len=seq_len, cost=RowCost(1.0, 0.0))
    micros = [from_micro_batch(micro) for micro in rows]
    counts = [count_members(micro) for micro in micros]
    total = {name: sum(count[name] for count in counts) for name in counts[0]}
    found: dict[str, list[float]] = {}
    for micro in micros:
        leaf = torch.full((len(micro),), -1.0, requires_grad=True)
        compute_loss(micro, leaf, total, IpoConfig())[0].backward()
        parts = leaf.grad.split(micro.sequence_lengths)
        for trace_id, grad in zip(micro.trace_ids, parts, strict=True):
            found.setdefault(trace_id, []).extend(g for g in grad.tolist() if g)
    return found


def test_grpo_sft_and_opd_in_one_batch_do_not_dilute_each_other():
    grpo = samples_of(GrpoConfig(), "math", [line("win", 1.0, 3), line("loss", 0.0, 5)])
    sft = samples_of(SftAlgoConfig(), "chat", [line("shown", 1.0, 4)])
    opd = samples_of(OpdConfig(), "code", [line("taught", 0.0, 2)])
    found = gradients(grpo + sft + opd)
    assert found["win"] == pytest.approx([-0.5 / 8] * 3)
    assert found["loss"] == pytest.approx([0.5 / 8] * 5)
    assert found["shown"] == pytest.approx([-1 / 4] * 4)
    assert found["taught"] == pytest.approx([-0.5 / 2] * 2)
    assert found == gradients(grpo) | gradients(sft) | gradients(opd)


def test_a_forked_trace_trains_its_common_node_once():
    nodes = [
        message(None, "user", 2),
        message(0, "assistant", 3, True),
        message(1, "tool", 1),
        message(2, "assistant", 2, True),
        message(1, "tool", 2),
        message(4, "assistant", 1, True),
    ]
    forked = rollout("forked", 1.0, nodes, [[0, 1, 2, 3], [0, 1, 4, 5]])
    found = gradients(samples_of(GrpoConfig(), "tools", [forked, line("plain", 0.0, 6)]))
    assert found["forked"] == pytest.approx([-0.5 / 12] * 6)
    assert found["plain"] == pytest.approx([0.5 / 12] * 6)


def test_echo_learns_the_tools_words_next_to_an_unchanged_policy_gradient():
    def episodes():
        nodes = [
            message(None, "user", 2),
            message(0, "assistant", 3, True),
            message(1, "tool", 4),
            message(2, "assistant", 1, True),
        ]
        return [rollout("tooled", 1.0, nodes, [[0, 1, 2, 3]]), line("plain", 0.0, 4)]

    plain = gradients(samples_of(GrpoConfig(), "tools", episodes()))
    echo = gradients(samples_of(EchoConfig(), "tools", episodes()))
    assert echo["plain"] == plain["plain"]
    assert sorted(echo["tooled"]) == pytest.approx(sorted([*plain["tooled"], *[-0.1 / 4] * 4]))


def test_a_prompt_without_credit_leaves_the_count():
    """Six tokens of equal rewards are pruned: the other prompt is divided by its own four tokens."""
    flat = samples_of(GrpoConfig(), "math", [line("a", 0.95, 3), line("b", 0.95, 3)])
    live = samples_of(GrpoConfig(), "math", [line("c", 1.0, 2), line("d", 0.0, 2)])
    assert flat == []
    assert gradients(flat + live)["c"] == pytest.approx([-0.5 / 4] * 2)


def test_prompt_aggregation_gives_long_and_short_prompts_equal_weight():
    config = GrpoConfig(loss_aggregation="prompt")
    short = samples_of(config, "math", [line("s1", 1.0, 1), line("s0", 0.0, 1)])
    long = samples_of(config, "math", [line("l1", 1.0, 10), line("l0", 0.0, 10)])
    found = gradients(short + long)
    assert math.fsum(map(abs, found["s1"])) == pytest.approx(math.fsum(map(abs, found["l1"])))
    assert found["s1"] == pytest.approx([-0.5 / 2 / 2])
    assert found["l1"] == pytest.approx([-0.5 / 20 / 2] * 10)
