"""Positions and readers: the same documents with any number of workers, none lost when ranks change."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from prl.config.sft import FakeDataConfig, RowsDataConfig, WarmStartDataConfig
from prl.config.training import ModelConfig
from prl.sft.documents import Document, build_documents
from prl.sft.generated import WarmStart
from prl.sft.position import Position, resume, start
from prl.sft.reader import CHUNK, Reader

TINY = ModelConfig(name="tiny")


def reader(data: RowsDataConfig, position: Position, seq_len: int = 64) -> Reader:
    return Reader(data, TINY, seq_len, 0, position)


def take(data: RowsDataConfig, count: int, position: Position | None = None) -> list[Document]:
    opened = reader(data, position or start(0, 1))
    try:
        return list(islice(opened, count))
    finally:
        opened.close()


def test_workers_change_nothing() -> None:
    count = 5 * CHUNK + 3
    alone, one, two = (take(RowsDataConfig(path="bundled:reverse_text", workers=n), count) for n in (0, 1, 2))
    assert alone == one == two
    assert [document.index for document in alone] == list(range(count))
    assert len({document.name for document in alone}) == count


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_is_named_when_its_turn_comes(tmp_path: Path, workers: int) -> None:
    good = {"prompt": "q", "completion": "a"}
    lines = [json.dumps(good)] * 3 + ['{"prompt": "q"}'] + [json.dumps(good)] * 3
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = RowsDataConfig(path=str(tmp_path / "rows.jsonl"), workers=workers, shuffle=False)
    opened = reader(data, start(0, 1))
    assert [next(opened).name for _ in range(3)] == ["rows:0", "rows:1", "rows:2"]
    with pytest.raises(ValueError, match=r"rows\.jsonl: row 3: it has neither"):
        next(opened)
    opened.close()


def test_a_worker_that_dies_ends_the_reader() -> None:
    opened = reader(RowsDataConfig(path="bundled:reverse_text", workers=1), start(0, 1))
    next(opened)
    opened._pool._workers[0].kill()
    with pytest.raises(ValueError, match="a data worker died"):
        list(islice(opened, 40 * CHUNK))
    opened.close()


def test_the_position_follows_what_is_delivered_not_what_is_read_ahead() -> None:
    data = RowsDataConfig(path="bundled:reverse_text", workers=1)
    opened = reader(data, Position(10, 3, [4, 1]))
    assert opened.position.state() == {"next": 10, "stride": 3, "pending": [4, 1]}
    assert next(opened).index == 4
    assert opened.position.state() == {"next": 10, "stride": 3, "pending": [1]}
    assert [next(opened).index for _ in range(3)] == [1, 10, 13]
    assert opened.position.state() == {"next": 16, "stride": 3, "pending": []}
    opened.close()
    rest = take(RowsDataConfig(path="bundled:reverse_text", workers=0), 2, opened.position)
    assert [document.index for document in rest] == [16, 19]


def test_parts_name_their_rows() -> None:
    data = RowsDataConfig(path="bundled:reverse_text", splits=["train", "test"], workers=0, shuffle=False)
    documents = take(data, 4)
    assert [document.name for document in documents] == ["train:0", "test:0", "train:1", "test:1"]
    assert build_documents(data, TINY, 64, 0).parts == ["train", "test"]


def test_the_seed_of_the_data_wins_over_that_of_the_run() -> None:
    orders = []
    for own, run in ((None, 1), (1, 2), (None, 2)):
        documents = build_documents(RowsDataConfig(path="bundled:reverse_text", seed=own), TINY, 64, run)
        orders.append([documents.document(i).name for i in range(5)])
    assert orders[0] == orders[1] != orders[2]


def test_generated_data_depends_on_its_index_alone() -> None:
    documents = build_documents(WarmStartDataConfig(batch_size=4), TINY, 64, 0)
    there = [documents.document(i) for i in range(10)]
    assert [documents.document(i) for i in reversed(range(10))] == there[::-1]
    prompts = [example.prompt for example in WarmStart(WarmStartDataConfig(batch_size=4), 0).batch(2)]
    assert [document.name for document in there[4:8]] == prompts


def test_fake_tokens() -> None:
    fixed = build_documents(FakeDataConfig(), TINY, 10, 0).document(263)
    assert fixed.token_ids == [263, *range(9)] and fixed.mask == [False] + [True] * 9
    varied = build_documents(FakeDataConfig(length="variable", tokens="random"), TINY, 10, 0)
    sizes = {len(varied.document(i).token_ids) for i in range(200)}
    assert sizes == set(range(2, 11)) and max(varied.document(3).token_ids) < 264
    assert varied.document(3) == varied.document(3)


def test_with_as_many_ranks_each_goes_on_where_it_was() -> None:
    states = [Position(12, 2, [8, 10]).state(), Position(9, 2, []).state()]
    assert [resume(states, rank, 2).state() for rank in range(2)] == states


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_with_another_number_of_ranks_no_sample_is_lost_or_repeated(ranks: int) -> None:
    states = [Position(20, 4, [16]), Position(9, 4, [1]), Position(14, 4, []), Position(31, 4, [23, 27])]
    unread = {16, 1, 23, 27} | set(range(9, 31, 4)) | set(range(14, 31, 4)) | set(range(20, 31, 4))
    positions = [resume([state.state() for state in states], rank, ranks) for rank in range(ranks)]
    found: list[int] = []
    for position in positions:
        found += islice(position.indices(), 60)
    assert len(found) == len(set(found))
    assert set(range(31, 60)) <= set(found) and {i for i in found if i < 31} == unread


def test_shared_reading_goes_on_at_one_place_for_any_number_of_ranks() -> None:
    states = [Position(64, 1).state()] * 2
    assert all(resume(states, rank, 3, shared=True).state() == states[0] for rank in range(3))
    apart = [list(islice(resume(states, rank, 2).indices(), 3)) for rank in range(2)]
    assert sorted(apart) == [[64, 66, 68], [65, 67, 69]]
    alone = [Position(7, 1, [3, 5]).state()]
    assert resume(alone, 0, 1, shared=True) == Position(7, 1, [3, 5])
    spread = [list(islice(resume(alone, rank, 2).indices(), 3)) for rank in range(2)]
    assert sorted([*spread[0], *spread[1]]) == [3, 5, 7, 8, 9, 10]
