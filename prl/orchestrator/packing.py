"""Samples -> packed rows -> equal numbers of rows for each trainer rank, balanced by compute.

Pure functions. First-fit by descending length into rows of at most `seq_len` tokens, rows split until every
rank can have one, zero-loss clones where the counts still differ, then Karmarkar-Karp with pairwise swaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from prl.orchestrator.assignment import assign_equal_counts
from prl.orchestrator.cost import RowCost
from prl.records import MicroBatch, TrainSample

PAD_TOKEN = 1
WEIGHT_STREAMS = ("rl_weights", "ce_weights", "ref_kl_weights")
FILL = {"ref_logprobs": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0}
"""What a stream that some members of a row lack means for them."""


def pack_batch(
    samples: Sequence[TrainSample], *, ranks: int, seq_len: int, cost: RowCost, multiple_of: int = 1
) -> list[list[MicroBatch]]:
    """Micro batches of each rank, equally many on all and at least one.

    `multiple_of`: row lengths are padded to a multiple of this. Raises ValueError without samples, or when a
    sample is longer than `seq_len`.
    """
    if not samples:
        raise ValueError("a batch without samples cannot be packed")
    bins = first_fit(samples, seq_len)
    bins = split_for_ranks(bins, ranks, cost)
    rows = [_concatenate(members, multiple_of) for members in bins]
    while len(rows) % ranks:
        rows.append(zero_loss_clone(rows[0]))
    loads = [cost.of(row.sequence_lengths) for row in rows]
    packed = [[rows[i] for i in part] for part in assign_equal_counts(loads, ranks)]
    for row in rows:
        check_row(row)
    return packed


def first_fit(samples: Sequence[TrainSample], seq_len: int) -> list[list[TrainSample]]:
    """Longest first (stable), each into the first bin with room for it."""
    bins: list[list[TrainSample]] = []
    room: list[int] = []
    for sample in sorted(samples, key=len, reverse=True):
        size = len(sample)
        if size > seq_len:
            raise ValueError(f"trace {sample.trace_id}: {size} tokens exceed the row of {seq_len}")
        place = next((i for i, free in enumerate(room) if free >= size), None)
        if place is None:
            place = len(bins)
            bins.append([])
            room.append(seq_len)
        bins[place].append(sample)
        room[place] -= size
    return bins


def split_for_ranks(bins: list[list[TrainSample]], ranks: int, cost: RowCost) -> list[list[TrainSample]]:
    """Split the costliest bins until their number is a multiple of `ranks`, or no bin can be split."""
    bins = list(bins)
    target = -(-len(bins) // ranks) * ranks
    while len(bins) < target:
        splittable = [i for i, members in enumerate(bins) if len(members) > 1]
        if not splittable:
            break
        costliest = max(splittable, key=lambda i: cost.of([len(sample) for sample in bins[i]]))
        bins[costliest : costliest + 1] = _halves(bins[costliest], cost)
    return bins


def _halves(members: list[TrainSample], cost: RowCost) -> list[list[TrainSample]]:
    """Longest processing time: the heaviest sample goes to the lighter side."""
    sides: list[list[TrainSample]] = [[], []]
    loads = [0.0, 0.0]
    for sample in sorted(members, key=len, reverse=True):
        lighter = loads.index(min(loads))
        sides[lighter].append(sample)
        loads[lighter] += cost.of([len(sample)])
    return sides


def _concatenate(members: Sequence[TrainSample], multiple_of: int) -> MicroBatch:
    padding = -sum(map(len, members)) % multiple_of
    row = MicroBatch(
        input_ids=[token for sample in members for token in sample.token_ids],
        position_ids=[position for sample in members for position in range(len(sample))],
        loss_mask=[flag for sample in members for flag in sample.mask],
        advantages=_stream(members, "advantages", 0.0),
        inference_logprobs=[value for sample in members for value in sample.logprobs],
        temperatures=[value for sample in members for value in sample.temperatures],
        sequence_lengths=[len(sample) for sample in members],
        envs=[sample.env for sample in members],
        trace_ids=[sample.trace_id for sample in members],
    )
    for name, fill in FILL.items():
        if any(getattr(sample, name) is not None for sample in members):
            setattr(row, name, _stream(members, name, fill))
    if padding:
        _pad(row, padding)
    return row


def _stream(members: Sequence[TrainSample], name: str, fill: float) -> list[float]:
    values: list[float] = []
    for sample in members:
        own = getattr(sample, name)
        values += [fill] * len(sample) if own is None else own
    return values


def _pad(row: MicroBatch, count: int) -> None:
    """A sequence of its own, so that attention and loss never mix it with data."""
    row.input_ids += [PAD_TOKEN] * count
    row.position_ids += range(count)
    row.loss_mask += [False] * count
    row.temperatures += [1.0] * count
    for name in ("advantages", "inference_logprobs", *FILL):
        if (values := getattr(row, name)) is not None:
            values += [0.0] * count
    row.sequence_lengths.append(count)
    row.envs.append("")
    row.trace_ids.append("")


def zero_loss_clone(row: MicroBatch) -> MicroBatch:
    """A row of the same compute that no loss component has a member in (ce and ref_kl ignore the mask)."""
    size = len(row)
    return MicroBatch(
        input_ids=list(row.input_ids),
        position_ids=list(row.position_ids),
        loss_mask=[False] * size,
        advantages=[0.0] * size,
        inference_logprobs=[0.0] * size,
        temperatures=list(row.temperatures),
        sequence_lengths=list(row.sequence_lengths),
        envs=[""] * len(row.envs),
        trace_ids=[""] * len(row.trace_ids),
    )


def check_row(row: MicroBatch) -> None:
    """Every per-token list has the row's length, every per-sequence list one entry a sequence."""
    size = len(row)
    names = ("position_ids", "loss_mask", "advantages", "inference_logprobs", "temperatures", *FILL)
    for name in names:
        values = getattr(row, name)
        assert values is None or len(values) == size, f"{name} has {len(values)} entries, the row {size}"
    assert sum(row.sequence_lengths) == size, "sequence lengths do not add up to the row"
    assert len(row.sequence_lengths) == len(row.envs) == len(row.trace_ids), "an entry a sequence"
