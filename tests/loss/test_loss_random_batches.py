"""Random episodes of several environments to one gradient, against the formulas in float64.

The reference walks trees of messages token by token and knows nothing of samples, streams or rows. Each
environment has an algorithm of its own; the batch is packed for one and two ranks, in long and short rows.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import pytest
import torch
from loss_builders import f32
from loss_reference import BY_NAME, cross_entropy

from prl.algo import build_algorithm
from prl.algo.samples import build_samples
from prl.config.algo import EchoConfig, EchoRoleConfig, GrpoConfig, MaxRlConfig, OpdConfig, SftAlgoConfig
from prl.config.loss import CispoConfig, IcePopConfig, IpoConfig, PpoConfig
from prl.loss.batch import count_row, from_micro_batch
from prl.loss.components import compute_loss
from prl.orchestrator.cost import RowCost
from prl.orchestrator.packing import pack_batch
from prl.records import Episode, Node, Trace

LOSSES = {"ipo": IpoConfig, "icepop": IcePopConfig, "ppo": PpoConfig, "cispo": CispoConfig}
ALPHAS = {"tool": 0.5, "user": 0.25}
ROLES = {role: EchoRoleConfig(alpha=alpha) for role, alpha in ALPHAS.items()}
ALGORITHMS = {
    "grpo": lambda prompt: GrpoConfig(loss_aggregation="prompt" if prompt else "token"),
    "echo": lambda prompt: EchoConfig(loss_aggregation="prompt" if prompt else "token", roles=ROLES),
    "max_rl": lambda prompt: MaxRlConfig(),
    "opd": lambda prompt: OpdConfig(),
    "sft": lambda prompt: SftAlgoConfig(),
}
SEQ_LEN = 14


@dataclass
class Token:
    """One token of a sample as the reference sees it: weights of the components, and what they need."""

    id: int
    b: float = 0.0
    rl: float = 0.0
    ce: float = 0.0
    ref_kl: float = 0.0
    a: float = 0.0
    q: float = 0.0
    lp: float = field(default=0.0)


def teacher_score(ids: list[int]) -> list[float]:
    return [0.0, *f32(-0.1 - (7 * ids[i] + 3 * ids[i - 1] + i) % 17 / 6 for i in range(1, len(ids)))]


class Teacher:
    async def score(self, token_ids: list[int], cache_salt: str | None = None) -> list[float]:
        return teacher_score(token_ids)


def random_trace(rng: random.Random, name: str) -> Trace:
    """A tree of one or two conversations that share their beginning; some rewards and agents do not count."""
    nodes: list[Node] = []

    def add(parent: int | None, role: str, sampled: bool) -> int:
        count = rng.randint(1, 4)
        mask = [False] * (sampled and rng.randint(0, 1)) + [sampled] * count
        ids = [rng.randrange(50) for _ in mask]
        content = [rng.random() < 0.7 for _ in mask] if rng.random() < 0.5 else None
        behaviour = f32(-rng.uniform(0.02, 4) for _ in range(sum(mask)))
        nodes.append(Node(parent, role, sampled, ids, mask, behaviour, content))
        return len(nodes) - 1

    def turns(path: list[int]) -> list[int]:
        for _ in range(rng.randint(1, 2)):
            path = [*path, add(path[-1], "assistant", True)]
            path = [*path, add(path[-1], rng.choice(["tool", "user"]), False)]
        return path

    first = turns([add(None, "user", False)])
    branches = [first, turns(first[:3])] if rng.random() < 0.4 else [first]
    reward = rng.choice([0.0, 1.0, 0.5, 0.95, None, float("nan")])
    return Trace(name, "agent", nodes, branches, reward, agent_trainable=rng.random() < 0.9)


def counts(trace: Trace) -> bool:
    return trace.agent_trainable and trace.reward is not None and trace.reward == trace.reward


def reference_credit(kind: str, group: list[Trace], prompt: bool) -> dict[str, tuple[float, float]]:
    """{trace id: (advantage, rl weight)} of the traces that count."""
    members = [trace for trace in group if counts(trace)]
    rewards = f32(trace.reward for trace in members)
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    weight = 1 / sum(map(sampled_tokens, members)) if prompt and members else 1.0
    if len(set(rewards)) < 2:
        return {trace.id: (0.0, weight) for trace in members}
    scale = 1 / mean if kind == "max_rl" else 1.0
    return {t.id: ((r - mean) * scale, weight) for t, r in zip(members, rewards, strict=True)}


def sampled_tokens(trace: Trace) -> int:
    return sum(sum(node.mask) for node in trace.nodes)


def reference_samples(kind: str, trace: Trace, credit: tuple[float, float]) -> list[list[Token]]:
    samples, seen = [], set[int]()
    for branch in trace.branches:
        scores = iter(teacher_score([token for i in branch for token in trace.nodes[i].token_ids]))
        tokens = [
            token
            for place, i in enumerate(branch)
            for token in reference_node(kind, trace.nodes[i], credit, scores, i not in seen, place > 1)
        ]
        if any(t.rl or t.ce or t.ref_kl for t in tokens):
            seen.update(branch)
        kept = tokens[:SEQ_LEN]
        for token in kept:
            token.rl *= token.a != 0
        if any(t.rl or t.ce or t.ref_kl for t in kept):
            samples.append(kept)
    return samples


def reference_node(kind, node, credit, scores, fresh, after_a_turn):
    behaviour = iter(node.logprobs)
    for place, (id_, sampled) in enumerate(zip(node.token_ids, node.mask, strict=True)):
        token, score = Token(id_), next(scores)
        logprob = next(behaviour) if sampled else 0.0
        if sampled and fresh:
            token.b = logprob
            if kind == "opd":
                token.ref_kl, token.q = 1.0, score
            elif kind == "sft":
                token.ce = 1.0
            else:
                token.a, token.rl = credit
        elif kind == "echo" and fresh and after_a_turn and not node.sampled:
            content = node.is_content is None or node.is_content[place]
            token.ce = ALPHAS[node.role] * content
        yield token


def reference_gradient(samples: list[list[Token]], rule) -> tuple[float, list[list[float]]]:
    tokens = [token for sample in samples for token in sample]
    n_rl = sum(t.rl for t in tokens)
    n_ce, n_ref = sum(t.ce != 0 for t in tokens), sum(t.ref_kl != 0 for t in tokens)
    total, gradients = 0.0, []
    for sample in samples:
        gradients.append([0.0] * len(sample))
        for i, t in enumerate(sample):
            parts = []
            if t.rl:
                parts.append([part / n_rl for part in rule(t.lp, t.b, t.a, t.rl)])
            if t.ce:
                parts.append([part / n_ce for part in cross_entropy(t.lp, t.ce)])
            if t.ref_kl:
                parts.append([part / n_ref for part in rule(t.lp, t.b, t.q - t.lp)])
            total += sum(value for value, _ in parts)
            gradients[-1][i] = sum(slope for _, slope in parts)
    return total, gradients


def random_batch(rng: random.Random):
    """(prl's samples, the reference's), in the same order, of one batch over three environments."""
    prompt, ours, theirs = rng.random() < 0.4, [], []
    kinds = [kind for kind in ALGORITHMS if not (prompt and kind == "max_rl")]
    for env, kind in enumerate(rng.sample(kinds, 3)):
        algorithm = build_algorithm(ALGORITHMS[kind](prompt), env=f"env{env}", teacher=Teacher())
        for number in range(2):
            group = [random_trace(rng, f"{env}-{number}-{i}") for i in range(4)]
            episodes = [Episode(t.id, f"env{env}", "g", "task", {}, [t]) for t in group]
            credit = reference_credit(kind, group, prompt)
            expected = {t.id: reference_samples(kind, t, credit[t.id]) for t in group if counts(t)}
            asyncio.run(score(algorithm, [episode for episode in episodes if episode.trainable_traces]))
            for trace in (trace for episode in episodes for trace in episode.trainable_traces):
                ours += build_samples(
                    trace, env=f"env{env}", action_loss=algorithm.action_loss, temperature=0.7 + 0.3 * env,
                    seq_len=SEQ_LEN,
                ).samples  # fmt: skip
                theirs += expected[trace.id]
    return ours, theirs


async def score(algorithm, episodes: list[Episode]) -> None:
    for episode in episodes:
        await algorithm.score_episode(episode)
    if episodes:
        await algorithm.score_group(episodes)


def packed_gradient(samples, learner: dict[str, list[float]], config, ranks: int, seq_len: int):
    """(loss, {trace id: gradient}) over all rows of all ranks; padding and fillers hold no number."""
    packed = pack_batch(samples, ranks=ranks, seq_len=seq_len, cost=RowCost(1.0, 0.01), multiple_of=4)
    rows = [row for part in packed for row in part]
    total = {name: sum(count_row(row)[name] for row in rows) for name in ("rl", "ce", "ref_kl")}
    loss, found = 0.0, {}
    for row in rows:
        sizes = list(zip(row.trace_ids, row.sequence_lengths, strict=True))
        values = [v for name, size in sizes for v in learner.get(name, [float("nan")] * size)]
        leaf = torch.tensor(values, requires_grad=True)
        part, _ = compute_loss(from_micro_batch(row), leaf, total, config)
        part.backward()
        loss += part.item()
        found |= dict(zip(row.trace_ids, leaf.grad.split(row.sequence_lengths), strict=True))
    return loss, found


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_of_several_algorithms_has_the_gradient_of_the_formulas(name: str, seed: int) -> None:
    rng = random.Random(f"{name}/{seed}")
    ours, theirs = random_batch(rng)
    assert [s.token_ids for s in ours] == [[t.id for t in sample] for sample in theirs]
    learner = {}
    for number, (sample, tokens) in enumerate(zip(ours, theirs, strict=True)):
        sample.trace_id = f"sample {number}"
        learner[sample.trace_id] = f32(-rng.uniform(0.02, 4) for _ in tokens)
        for token, logprob in zip(tokens, learner[sample.trace_id], strict=True):
            token.lp = logprob
    expected, slopes = reference_gradient(theirs, BY_NAME[name])
    for ranks, seq_len in ((1, 64), (1, SEQ_LEN), (2, 32)):
        loss, found = packed_gradient(ours, learner, LOSSES[name](), ranks, seq_len)
        assert loss == pytest.approx(expected, rel=1e-5, abs=1e-6)
        for trace_id, wanted in zip(learner, slopes, strict=True):
            assert found[trace_id].tolist() == pytest.approx(wanted, rel=2e-6, abs=1e-8)
        assert not any(found[trace_id].any() for trace_id in found.keys() - learner.keys())
