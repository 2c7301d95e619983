"""Batches through files: whole or not there, the right step and rank, and none of an older attempt."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from prl.orchestrator.cost import RowCost
from prl.orchestrator.file_transport import FileSender, batch_file
from prl.orchestrator.packing import pack_batch
from prl.orchestrator.wire import encode_shipment
from prl.records import MicroBatch, TrainSample
from prl.trainer.receiver import BatchReceiver, FileReceiver, open_receiver

WAIT = 20.0


def rows(step: int) -> list[list[MicroBatch]]:
    samples = [
        TrainSample([step] * 3, [True] * 3, [-0.1] * 3, [1.0] * 3, "a", f"t{i}", [0.5] * 3) for i in range(4)
    ]
    return pack_batch(samples, ranks=2, seq_len=6, cost=RowCost())


def messages(step: int) -> list[bytes]:
    return [encode_shipment(step, rank, part) for rank, part in enumerate(rows(step))]


def sender(tmp_path: Path, first: int = 1) -> tuple[FileSender, str]:
    made = FileSender(tmp_path / "batches", 2, first)
    return made, made.bind()


def test_what_is_shipped_is_received_by_each_rank(tmp_path: Path) -> None:
    outbox, address = sender(tmp_path)
    receivers = [open_receiver(address, rank, 2) for rank in range(2)]
    assert all(isinstance(receiver, FileReceiver) for receiver in receivers)
    found: dict[int, list[MicroBatch]] = {}
    thread = threading.Thread(target=lambda: found.update({0: receivers[0].receive(1, WAIT)}))
    thread.start()
    asyncio.run(outbox.put(1, messages(1)))
    thread.join(WAIT)
    found[1] = receivers[1].receive(1, WAIT)
    assert [found[0], found[1]] == rows(1)
    for receiver in receivers:
        receiver.close()
    outbox.close()


def test_another_address_is_a_socket() -> None:
    receiver = open_receiver("tcp://127.0.0.1:9", 0, 1)
    assert isinstance(receiver, BatchReceiver)
    receiver.close()


def test_read_batches_are_removed_and_unread_ones_kept(tmp_path: Path) -> None:
    outbox, _ = sender(tmp_path)
    for step in range(1, 6):
        asyncio.run(outbox.put(step, messages(step)))
        names = sorted(path.name for path in (tmp_path / "batches").iterdir())
        assert names == [f"step_{s}" for s in range(max(1, step - 1), step + 1)]
    assert not list((tmp_path / "batches").rglob("*.tmp"))


def test_an_older_attempts_batches_are_gone_before_the_address_is_known(tmp_path: Path) -> None:
    stale = batch_file(tmp_path / "batches", 3, 0)
    stale.parent.mkdir(parents=True)
    stale.write_bytes(b"of another attempt")
    _, address = sender(tmp_path, first=3)
    with pytest.raises(TimeoutError, match="rank 0: batch 3 did not come within 0 s"):
        open_receiver(address, 0, 2).receive(3, 0.1)


def test_p8_a_file_of_another_step_or_rank_is_refused(tmp_path: Path) -> None:
    _, address = sender(tmp_path)
    wrong = messages(2)
    for rank, content in ((0, wrong[0]), (1, wrong[0])):
        path = batch_file(tmp_path / "batches", 1, rank)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"rank {rank} wants batch 1, got batch 2 of rank 0"):
            open_receiver(address, rank, 2).receive(1, WAIT)


def test_shipping_out_of_order_or_for_other_ranks_is_a_bug(tmp_path: Path) -> None:
    outbox, _ = sender(tmp_path)
    with pytest.raises(AssertionError, match="batch 2 shipped, 1 is due"):
        asyncio.run(outbox.put(2, messages(2)))
    with pytest.raises(AssertionError, match="1 messages for 2 ranks"):
        asyncio.run(outbox.put(1, messages(1)[:1]))


def test_it_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    outbox, _ = sender(tmp_path)

    async def scenario() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await outbox.serve()

    asyncio.run(scenario())
