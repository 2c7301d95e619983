"""Micro batches by hand and at random, and the whole of prl's loss over several of them."""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import torch

from prl.loss.batch import from_micro_batch
from prl.loss.components import compute_loss, count_members
from prl.records import MicroBatch, TrainSample

STREAMS = ("advantages", "ref_logprobs", "rl_weights", "ce_weights", "ref_kl_weights")
FILL = {"rl_weights": 1.0}


def f32(values) -> list[float]:
    return [float(np.float32(value)) for value in values]


def joined(lists) -> list:
    return list(chain.from_iterable(lists))


def sample(logprobs, *, env="tools", trace_id="t", prompt=1, **streams) -> TrainSample:
    """A sample whose tokens after `prompt` context tokens were sampled with `logprobs`."""
    n = prompt + len(logprobs)
    return TrainSample(
        token_ids=list(range(n)),
        mask=[False] * prompt + [True] * len(logprobs),
        logprobs=[0.0] * prompt + list(logprobs),
        temperatures=[1.0] * n,
        env=env,
        trace_id=trace_id,
        **{name: [0.0] * prompt + list(values) for name, values in streams.items()},
    )


def row(samples: list[TrainSample], padding: int = 0) -> MicroBatch:
    """Samples side by side; a stream exists iff any member has it."""
    n = sum(map(len, samples)) + padding

    def join(read, fill):
        return [value for s in samples for value in read(s)] + [fill] * padding

    streams = {
        name: join(lambda s, name=name: getattr(s, name) or [FILL.get(name, 0.0)] * len(s), 0.0)
        for name in STREAMS
        if name == "advantages" or any(getattr(s, name) is not None for s in samples)
    }
    micro = MicroBatch(
        input_ids=join(lambda s: s.token_ids, 1),
        position_ids=[p for s in samples for p in range(len(s))] + list(range(padding)),
        loss_mask=join(lambda s: s.mask, False),
        inference_logprobs=join(lambda s: s.logprobs, 0.0),
        temperatures=join(lambda s: s.temperatures, 1.0),
        sequence_lengths=[len(s) for s in samples] + [padding] * bool(padding),
        envs=[s.env for s in samples] + [""] * bool(padding),
        trace_ids=[s.trace_id for s in samples] + [""] * bool(padding),
        **streams,
    )
    assert len(micro) == n
    return micro


def run(micros, logprobs, config, counts=None):
    """(loss, gradient by each row's logprobs, metrics) of rows that form one global batch."""
    tensors = [from_micro_batch(micro) for micro in micros]
    if counts is None:
        parts = [count_members(t) for t in tensors]
        counts = {name: sum(part[name] for part in parts) for name in parts[0]}
    leaves = [torch.tensor(values, dtype=torch.float32, requires_grad=True) for values in logprobs]
    total, metrics = 0.0, []
    for micro, leaf in zip(tensors, leaves, strict=True):
        loss, found = compute_loss(micro, leaf, counts, config)
        loss.backward()
        total += loss.item()
        metrics.append(found)
    return total, [leaf.grad.tolist() for leaf in leaves], metrics


def random_samples(seed: int, kinds=("rl", "ce", "ref_kl"), count: int = 9) -> list[TrainSample]:
    """Samples as grpo, sft and opd make them, in turn."""
    rng = random.Random(seed)
    samples = []
    for i in range(count):
        n = rng.randint(1, 7)
        streams = {
            "rl": lambda n=n: {"advantages": [rng.choice([-1.5, 0.5, 2.0])] * n},
            "ce": lambda n=n: {"ce_weights": [1.0] * n, "rl_weights": [0.0] * n},
            "ref_kl": lambda n=n: {
                "ref_kl_weights": [1.0] * n,
                "rl_weights": [0.0] * n,
                "ref_logprobs": f32(-rng.uniform(0.05, 4) for _ in range(n)),
            },
        }[kinds[i % len(kinds)]]()
        behaviour = f32(-rng.uniform(0.05, 4) for _ in range(n))
        samples.append(
            sample(behaviour, env=f"env{i % 2}", trace_id=f"t{i}", prompt=rng.randint(1, 3), **streams)
        )
    return samples
