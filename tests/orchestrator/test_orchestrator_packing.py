"""Samples to rows to ranks: the worked example, and properties on random batches."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.orchestrator.assignment import assign_equal_counts
from prl.orchestrator.cost import RowCost
from prl.orchestrator.packing import check_row, first_fit, pack_batch, split_for_ranks, zero_loss_clone
from prl.records import MicroBatch, TrainSample

TOKENS = RowCost()
_ids = itertools.count(1000)


def sample(size: int, name: str = "", **streams: list[float]) -> TrainSample:
    ids = [next(_ids) for _ in range(size)]
    mask = [False] + [True] * (size - 1)
    return TrainSample(
        ids, mask, [-0.1 * m for m in mask], [1.0] * size, "env", name or f"t{ids[0]}",
        advantages=[0.5 * m for m in mask], **streams,
    )  # fmt: skip


def lengths(bins: list[list[TrainSample]]) -> list[list[int]]:
    return [[len(member) for member in members] for members in bins]


def test_the_worked_example() -> None:
    samples = [sample(n) for n in (3, 5, 2, 4, 3)]
    bins = first_fit(samples, 8)
    assert lengths(bins) == [[5, 3], [4, 3], [2]]
    assert lengths(split_for_ranks(bins, 2, TOKENS)) == [[5], [3], [4, 3], [2]]
    packed = pack_batch(samples, ranks=2, seq_len=8, cost=TOKENS)
    assert sorted(sum(map(len, rows)) for rows in packed) == [8, 9]
    assert [len(rows) for rows in packed] == [2, 2]


def test_first_fit_keeps_the_order_of_equal_lengths() -> None:
    samples = [sample(3, name) for name in "abcd"]
    assert [[s.trace_id for s in members] for members in first_fit(samples, 6)] == [["a", "b"], ["c", "d"]]


def test_a_sample_longer_than_a_row_is_an_error() -> None:
    with pytest.raises(ValueError, match="9 tokens exceed the row of 8"):
        first_fit([sample(9)], 8)


def test_no_sample_is_an_error() -> None:
    with pytest.raises(ValueError, match="without samples"):
        pack_batch([], ranks=1, seq_len=8, cost=TOKENS)


def test_one_rank_splits_nothing() -> None:
    bins = first_fit([sample(n) for n in (5, 3, 4)], 8)
    assert split_for_ranks(bins, 1, TOKENS) == bins


def test_the_costliest_bin_is_split_first_and_by_cost() -> None:
    bins = [[sample(4), sample(4)], [sample(8)], [sample(3), sample(2), sample(2)]]
    assert lengths(split_for_ranks(bins, 4, TOKENS)) == [[4], [4], [8], [3, 2, 2]]
    quadratic = RowCost(0.0, 1.0)
    skewed = [[sample(6), sample(1), sample(1)], [sample(4), sample(4)], [sample(8)]]
    assert lengths(split_for_ranks(skewed, 4, quadratic)) == [[6], [1, 1], [4, 4], [8]]


def test_what_cannot_be_split_is_filled_with_clones() -> None:
    packed = pack_batch([sample(4), sample(3), sample(6)], ranks=2, seq_len=6, cost=TOKENS)
    rows = [row for part in packed for row in part]
    clones = [row for row in rows if not any(row.loss_mask)]
    assert [len(part) for part in packed] == [2, 2] and len(rows) == 4 and len(clones) == 1


def test_fewer_samples_than_ranks_still_give_every_rank_a_row() -> None:
    packed = pack_batch([sample(4)], ranks=3, seq_len=6, cost=TOKENS)
    assert [len(part) for part in packed] == [1, 1, 1]
    assert sum(any(row.loss_mask) for part in packed for row in part) == 1


def test_a_clone_is_in_no_component() -> None:
    one = sample(3, ce_weights=[0.0, 1.0, 1.0], rl_weights=[0.0] * 3, ref_kl_weights=[0.0, 1.0, 1.0])
    (row,) = pack_batch([one], ranks=1, seq_len=8, cost=TOKENS)[0]
    clone = zero_loss_clone(row)
    check_row(clone)
    assert clone.input_ids == row.input_ids and clone.sequence_lengths == row.sequence_lengths
    assert not any(clone.loss_mask) and not any(clone.advantages)
    assert (clone.rl_weights, clone.ce_weights, clone.ref_kl_weights) == (None, None, None)
    assert clone.envs == [""] and clone.trace_ids == [""]


def test_a_row_joins_its_members_and_restarts_positions() -> None:
    first, second = sample(3, "a"), sample(2, "b")
    (row,) = pack_batch([second, first], ranks=1, seq_len=8, cost=TOKENS)[0]
    assert row.input_ids == first.token_ids + second.token_ids
    assert row.position_ids == [0, 1, 2, 0, 1]
    assert row.sequence_lengths == [3, 2] and row.trace_ids == ["a", "b"] and row.envs == ["env", "env"]
    assert row.loss_mask == [False, True, True, False, True]
    assert row.inference_logprobs == [0.0, -0.1, -0.1, 0.0, -0.1]
    assert (row.ref_logprobs, row.rl_weights, row.ce_weights, row.ref_kl_weights) == (None,) * 4


def test_a_stream_exists_iff_a_member_has_it_and_the_others_are_filled() -> None:
    plain = sample(2, "plain")
    distilled = sample(
        3, "distilled", ref_logprobs=[0.0, -0.5, -0.25], ref_kl_weights=[0.0, 1.0, 1.0], rl_weights=[0.0] * 3
    )
    learned = sample(4, "learned", ce_weights=[0.0, 0.1, 0.1, 0.1])
    learned.advantages = None
    (row,) = pack_batch([plain, distilled, learned], ranks=1, seq_len=16, cost=TOKENS)[0]
    assert row.trace_ids == ["learned", "distilled", "plain"]
    assert row.advantages == [0.0] * 4 + distilled.advantages + plain.advantages
    assert row.rl_weights == [1.0] * 4 + [0.0] * 3 + [1.0] * 2
    assert row.ce_weights == [0.0, 0.1, 0.1, 0.1] + [0.0] * 5
    assert row.ref_logprobs == [0.0] * 4 + [0.0, -0.5, -0.25] + [0.0] * 2
    assert row.ref_kl_weights == [0.0] * 4 + [0.0, 1.0, 1.0] + [0.0] * 2


def test_padding_is_a_sequence_of_its_own() -> None:
    one = sample(5, "a", ref_logprobs=[0.0] * 5, ref_kl_weights=[0.0, 1.0, 1.0, 1.0, 1.0])
    (row,) = pack_batch([one], ranks=1, seq_len=8, cost=TOKENS, multiple_of=4)[0]
    check_row(row)
    assert len(row) == 8 and row.sequence_lengths == [5, 3]
    assert row.position_ids == [0, 1, 2, 3, 4, 0, 1, 2]
    assert row.envs == ["env", ""] and row.trace_ids == ["a", ""]
    assert row.loss_mask[5:] == [False] * 3 and row.temperatures[5:] == [1.0] * 3
    assert row.ref_kl_weights is not None and row.ref_kl_weights[5:] == [0.0] * 3


def test_a_malformed_row_does_not_leave() -> None:
    row = MicroBatch([1, 2], [0, 1], [True, True], [0.0], [0.0, 0.0], [1.0, 1.0], [2], ["a"], ["t"])
    with pytest.raises(AssertionError, match="advantages has 1"):
        check_row(row)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=40),
    st.integers(1, 4),
    st.integers(40, 90),
    st.sampled_from([1, 4]),
    st.sampled_from([RowCost(), RowCost(3.0, 0.5), RowCost(0.0, 1.0)]),
)
def test_every_token_is_packed_once_and_ranks_get_equal_counts(
    sizes: list[int], ranks: int, seq_len: int, multiple_of: int, cost: RowCost
) -> None:
    samples = [sample(size) for size in sizes]
    packed = pack_batch(samples, ranks=ranks, seq_len=seq_len, cost=cost, multiple_of=multiple_of)
    assert len({len(rows) for rows in packed}) == 1 and len(packed) == ranks and packed[0]
    rows = [row for part in packed for row in part]
    trained = [t for row in rows for t, member in zip(row.input_ids, row.loss_mask, strict=True) if member]
    assert sorted(trained) == sorted(t for s in samples for t in s.token_ids[1:])
    for row in rows:
        check_row(row)
        assert len(row) % multiple_of == 0
        assert sum(n for n, env in zip(row.sequence_lengths, row.envs, strict=True) if env) <= seq_len


def brute_force(loads: list[float], workers: int) -> float:
    """Smallest possible largest load with equal counts."""
    size = len(loads) // workers
    best = float("inf")
    for order in itertools.permutations(range(len(loads))):
        parts = [order[i * size : (i + 1) * size] for i in range(workers)]
        best = min(best, max(sum(loads[i] for i in part) for part in parts))
    return best


def test_assignment_is_close_to_the_best_one() -> None:
    rng = random.Random(1)
    for _ in range(30):
        loads = [float(rng.randint(1, 30)) for _ in range(6)]
        for workers in (2, 3):
            parts = assign_equal_counts(loads, workers)
            assert sorted(i for part in parts for i in part) == list(range(6))
            assert len({len(part) for part in parts}) == 1
            largest = max(sum(loads[i] for i in part) for part in parts)
            assert largest <= 1.15 * brute_force(loads, workers)


def test_assignment_of_many_rows_is_balanced() -> None:
    rng = random.Random(2)
    loads = [rng.random() ** 3 for _ in range(400)]
    totals = [sum(loads[i] for i in part) for part in assign_equal_counts(loads, 8)]
    assert max(totals) - min(totals) < 0.01 * max(totals)


def test_assignment_is_the_same_every_time() -> None:
    loads = [3.0, 3.0, 2.0, 2.0, 1.0, 1.0]
    assert assign_equal_counts(loads, 2) == assign_equal_counts(list(loads), 2)
