"""Packing, skipping, counting, and a feed that goes on bitwise from its state."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from prl.config import training
from prl.config.schema import SftConfig
from prl.config.sft import LossMaskConfig, RowsDataConfig, WarmStartDataConfig
from prl.records import MicroBatch
from prl.sft.documents import Document
from prl.sft.feed import open_feed
from prl.sft.packing import PATIENCE, Cat, Stack, as_micro_batch, as_sample


def document(index: int, size: int) -> Document:
    return Document(index, "part", f"row:{index}", list(range(size)), [i > 0 for i in range(size)])


def config(seq_len: int = 48, **data: Any) -> SftConfig:
    settings = {"path": "bundled:reverse_text", "workers": 0, "batch_size": 6, **data}
    return SftConfig(
        data=RowsDataConfig(**settings),
        optim=None,
        scheduler=None,
        tracking=None,
        inference=None,
        model=training.ModelConfig(name="tiny"),
        trainer=training.TrainerConfig(seq_len=seq_len),
    )


def batches(
    made: SftConfig, steps: int, rank: int = 0, ranks: int = 1, states: Any = None
) -> tuple[Any, Any]:
    """(rows of each step as tables, the state after the last)."""
    feed = open_feed(made, rank, ranks, states)
    rows = [[asdict(row) for row in feed.batch()] for _ in range(steps)]
    state = json.loads(json.dumps(feed.state()))
    feed.close()
    return rows, state


def names(rows: list[list[dict]]) -> list[str]:
    return [name for step in rows for row in step for name in row["trace_ids"] if name]


def test_cat_fills_rows_and_carries_over_what_does_not_fit() -> None:
    packer = Cat(10)
    rows = [packer.add(document(i, size)) for i, size in enumerate([4, 5, 3, 7, 10, 1])]
    finished = [[d.index for d in row] for row in rows if row]
    assert finished == [[0, 1], [2, 3], [4]]
    assert packer.pending == [5]
    assert [[d.index for d in row] for row in packer.flush()] == [[5]] and packer.pending == []


def test_stack_joins_documents_of_like_length() -> None:
    packer = Stack(2)
    sizes = [10, 300, 256, 257, 600, 512]
    finished = [[d.index for d in row] for i, s in enumerate(sizes) if (row := packer.add(document(i, s)))]
    assert finished == [[0, 2], [1, 3]]
    assert packer.pending == [4, 5]
    assert [[d.index for d in row] for row in packer.flush()] == [[5], [4]]


def test_no_document_waits_in_a_stack_for_ever() -> None:
    packer = Stack(3)
    assert packer.add(document(0, 900)) is None
    assert packer.add(document(PATIENCE, 10)) is None
    (old,) = packer.add(document(PATIENCE + 1, 10))
    assert old.index == 0 and packer.pending == [PATIENCE, PATIENCE + 1]


def test_a_stack_goes_on_where_it_was_though_documents_of_it_are_overdue() -> None:
    """With many ranks the indices of one rank lie far apart: several buckets are overdue at once, and one
    leaves with each document. Adding what was pending again must not let one leave earlier."""
    draw, stride = random.Random(2), 64
    sizes = draw.choices([10, 300, 600, 1200, 2400], k=300)
    stream = [document(stride * i, size) for i, size in enumerate(sizes)]
    whole, pending, rows = Stack(4), list[list[int]](), list[Any]()
    for found in stream:
        pending.append(whole.pending)
        rows.append(whole.add(found))
    for cut, left in enumerate(pending):
        resumed = Stack(4, since=stride * cut)
        assert not any(resumed.add(stream[index // stride]) for index in left)
        assert [resumed.add(found) for found in stream[cut : cut + 40]] == rows[cut : cut + 40]


def test_a_row_for_the_trainer() -> None:
    row = as_micro_batch([document(3, 3), document(4, 2)], "mine", 8)
    assert row.input_ids == [0, 1, 2, 0, 1, 1, 1, 1]
    assert row.position_ids == [0, 1, 2, 0, 1, 0, 1, 2]
    assert row.sequence_lengths == [3, 2, 3] and row.envs == ["mine", "mine", ""]
    assert row.trace_ids == ["row:3", "row:4", ""]
    assert row.loss_mask == [False, True, True, False, True, False, False, False]
    assert row.ce_weights == [float(flag) for flag in row.loss_mask]
    assert set(row.rl_weights) == {0.0} and set(row.temperatures) == {1.0}


def test_a_sample_for_the_packer_of_whole_batches() -> None:
    sample = as_sample(document(3, 4), "mine")
    assert sample.ce_weights == [0.0, 1.0, 1.0, 1.0] and sample.mask == [False, True, True, True]
    assert sample.rl_weights == [0.0] * 4 and sample.advantages is sample.ref_kl_weights is None
    assert (sample.token_ids, sample.env, sample.trace_id) == ([0, 1, 2, 3], "mine", "row:3")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_the_samples_by_their_index(ranks: int) -> None:
    made = config()
    parts = [batches(made, 4, rank, ranks)[0] for rank in range(ranks)]
    assert all(len(step) == 6 // ranks for part in parts for step in part)
    order = names(batches(config(batch_size=1), 60)[0])
    for rank, part in enumerate(parts):
        own = order[rank::ranks]
        assert names(part) == own[: len(names(part))]
        assert all(sum(row["sequence_lengths"]) <= 48 for step in part for row in step)


@pytest.mark.parametrize("packing", ["cat", "stack", "fit"])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_a_feed_goes_on_bitwise(packing: str, rank: int, ranks: int) -> None:
    made = config(packing=packing, micro_batch_size=1 if packing == "fit" else 3)
    straight, end = batches(made, 7, rank, ranks)
    for cut in (1, 4):
        states = [batches(made, cut, r, ranks)[1] for r in range(ranks)]
        rest, finish = batches(made, 7 - cut, rank, ranks, states)
        assert rest == straight[cut:] and finish == end


def test_a_resumed_stack_knows_what_was_read_before() -> None:
    made = config(packing="stack", micro_batch_size=2)
    _, state = batches(made, 1)
    feed = open_feed(made, 0, 1, [state])
    assert feed._packer._since == state["position"]["next"] > 0 == open_feed(made, 0, 1)._packer._since
    feed.close()


def test_a_feed_goes_on_bitwise_with_another_number_of_workers() -> None:
    straight, _ = batches(config(), 6)
    _, state = batches(config(), 3)
    rest, _ = batches(config(workers=1), 3, states=[state])
    assert rest == straight[3:]


@pytest.mark.parametrize("ranks", [1, 3])
def test_when_ranks_change_every_sample_is_still_trained_on_once(ranks: int) -> None:
    made = config(shuffle=False)
    before = [batches(made, 5, rank, 2) for rank in range(2)]
    states = [state for _, state in before]
    after = [batches(made, 5, rank, ranks, states) for rank in range(ranks)]
    seen = Counter(name for rows, _ in [*before, *after] for name in names(rows))
    assert set(seen.values()) == {1}
    first = {f"reverse_text:{i}" for i in range(60)} | {f"rows:{i}" for i in range(60)}
    assert len(first & set(seen)) == 60, "none was left out"
    counters = sum((Counter(state["counters"]) for _, state in after), Counter())
    assert counters["samples"] == sum(seen.values())


def test_whole_batches_are_the_same_for_any_number_of_ranks() -> None:
    made = config(packing="fit", batch_size=16)
    alone = names(batches(made, 3)[0])
    parts = [batches(made, 3, rank, 3) for rank in range(3)]
    assert sorted(name for rows, _ in parts for name in names(rows)) == sorted(alone) and len(alone) == 48
    assert len({tuple(map(len, rows)) for rows, _ in parts}) == 1
    assert [state["counters"].get("samples", 0) for _, state in parts] == [48, 0, 0]


def test_rows_without_a_learned_token_are_skipped_and_counted(tmp_path: Path) -> None:
    lines = [{"prompt": "x" * (100 if i % 3 == 0 else 2), "completion": "ab"} for i in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = config(path=str(tmp_path / "rows.jsonl"), batch_size=1, shuffle=False)
    feed = open_feed(made, 0, 1)
    read = [name for _ in range(3) for row in feed.batch() for name in row.trace_ids]
    assert read == [f"rows:{i % 9}" for i in range(len(read) * 2) if i % 3][: len(read)]
    assert feed.counters["skipped"] == sum(i % 3 == 0 for i in range(feed.reader.position.next))
    assert feed.counters["samples"] == len(read)
    assert feed.counters["tokens"] == 8 * len(read) and feed.counters["learned"] == 3 * len(read)


def test_data_with_nothing_to_learn_is_told(tmp_path: Path) -> None:
    made = config(seq_len=4)
    feed = open_feed(made, 0, 1)
    with pytest.raises(
        ValueError, match=r"none of 2000 samples has a token to learn within trainer\.seq_len"
    ):
        feed.batch()


def test_cut_samples_are_counted() -> None:
    feed = open_feed(config(seq_len=16, batch_size=2), 0, 1)
    rows = [row for _ in range(10) for row in feed.batch()]
    full = sum(length == 16 for row in rows for length in row.sequence_lengths)
    assert 0 < feed.counters["truncated"] <= full


def test_rows_are_padded_where_layers_are_compiled() -> None:
    made = config(micro_batch_size=2)
    made.trainer.compile = True
    feed = open_feed(made, 0, 1)
    rows: list[MicroBatch] = feed.batch()
    assert {len(row) for row in rows} == {96} and len(rows) == 3
    assert feed.counters["tokens"] == sum(
        size for row in rows for size, env in zip(row.sequence_lengths, row.envs, strict=True) if env
    )


def test_the_mask_of_the_config_counts() -> None:
    made = config(loss_mask=LossMaskConfig(user=True))
    more = open_feed(made, 0, 1)
    less = open_feed(config(), 0, 1)
    assert sum(map(sum, (row.loss_mask for row in more.batch()))) > 2 * sum(
        map(sum, (row.loss_mask for row in less.batch()))
    )


def test_the_warm_start_gives_the_samples_of_its_steps() -> None:
    made = config()
    made.data = WarmStartDataConfig(batch_size=5)
    first, second = batches(made, 2)[0]
    assert len(names([first])) == len(names([second])) == 5
    assert not set(names([first])) & set(names([second]))
