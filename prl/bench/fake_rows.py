"""Packed rows of made-up tokens, shaped like those of a training step."""

from __future__ import annotations

import math
import random

from prl.records import MicroBatch


def fake_row(seq_len: int, documents: int, vocabulary: int, seed: int) -> MicroBatch:
    """One row of `seq_len` tokens in `documents` documents of about equal length, every token in the loss.

    Raises ValueError if a document would have fewer than two tokens.
    """
    if seq_len < 2 * documents:
        raise ValueError(f"docs={documents} documents do not fit into seq_len={seq_len}")
    draw = random.Random(seed)
    short, longer = divmod(seq_len, documents)
    lengths = [short + (index < longer) for index in range(documents)]
    return MicroBatch(
        input_ids=[draw.randrange(vocabulary) for _ in range(seq_len)],
        position_ids=[position for length in lengths for position in range(length)],
        loss_mask=[position > 0 for length in lengths for position in range(length)],
        advantages=[draw.choice((-1.0, 1.0)) for _ in range(seq_len)],
        inference_logprobs=[-math.log(vocabulary) + 0.1 * draw.random() for _ in range(seq_len)],
        temperatures=[1.0] * seq_len,
        sequence_lengths=lengths,
        envs=["bench"] * documents,
        trace_ids=[f"bench-{index}" for index in range(documents)],
    )
