"""Sender and receiver over real sockets: the sender on a loop in a thread, receivers blocking."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import zmq

from prl.orchestrator.transport import BatchSender
from prl.orchestrator.wire import encode_shipment
from prl.records import MicroBatch
from prl.trainer.receiver import BatchReceiver

WAIT = 5.0


def rows(mark: int) -> list[MicroBatch]:
    return [MicroBatch([mark], [0], [True], [1.0], [-1.0], [1.0], [1], ["a"], [f"t{mark}"])]


class Host:
    """Runs a `BatchSender` on its own loop."""

    def __init__(self, ranks: int, first_step: int = 1) -> None:
        self.ranks = ranks
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.sender: BatchSender = self.call(self._make(ranks, first_step))
        self.address: str = self.sender.bind()
        self.serving = asyncio.run_coroutine_threadsafe(self.sender.serve(), self.loop)

    async def _make(self, ranks: int, first_step: int) -> BatchSender:
        return BatchSender(ranks, first_step)

    def call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(WAIT)

    def put(self, step: int) -> None:
        self.call(
            self.sender.put(step, [encode_shipment(step, r, rows(10 * step + r)) for r in range(self.ranks)])
        )

    def close(self) -> None:
        self.serving.cancel()
        self.call(asyncio.sleep(0))
        self.loop.call_soon_threadsafe(self.sender.close)
        self.call(asyncio.sleep(0))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(WAIT)
        self.loop.close()


@pytest.fixture
def make() -> Iterator[Any]:
    opened: list[Any] = []

    def build(ranks: int = 1, first_step: int = 1) -> tuple[Host, list[BatchReceiver]]:
        host = Host(ranks, first_step)
        receivers = [BatchReceiver(host.address, rank, ranks) for rank in range(ranks)]
        opened.extend([*receivers, host])
        return host, receivers

    yield build
    for item in opened:
        item.close()


def marks(batch: list[MicroBatch]) -> list[int]:
    return [row.input_ids[0] for row in batch]


def test_a_rank_that_asks_first_gets_the_batch_when_it_ships(make: Any) -> None:
    host, (receiver,) = make()
    threading.Timer(0.1, host.put, [1]).start()
    assert marks(receiver.receive(1, WAIT)) == [10]


def test_batches_wait_for_the_trainer_in_order(make: Any) -> None:
    host, (receiver,) = make()
    host.put(1)
    host.put(2)
    assert [marks(receiver.receive(step, WAIT)) for step in (1, 2)] == [[10], [20]]


def test_p9_every_rank_gets_its_own_part_however_late_it_comes(make: Any) -> None:
    host, (fast, slow) = make(ranks=2)
    host.put(1)
    host.put(2)
    assert [marks(fast.receive(step, WAIT)) for step in (1, 2)] == [[10], [20]]
    host.put(3)
    assert marks(fast.receive(3, WAIT)) == [30]
    assert [marks(slow.receive(step, WAIT)) for step in (1, 2, 3)] == [[11], [21], [31]]


def test_p9_ranks_that_wait_together_are_each_given_their_own_part(make: Any) -> None:
    host, receivers = make(ranks=3)
    with ThreadPoolExecutor(len(receivers)) as pool:
        asked = [pool.submit(receiver.receive, 1, WAIT) for receiver in receivers]
        until = time.monotonic() + WAIT
        while len(host.sender._parked) < len(receivers):
            assert time.monotonic() < until, "a rank that waits is not known"
            time.sleep(0.01)
        host.put(1)
        assert [marks(answer.result(WAIT)) for answer in asked] == [[10], [11], [12]]
    assert host.sender._parked == {}


@pytest.mark.parametrize(("first", "asked"), [(1, 3), (1, 0), (5, 4), (5, 1)])
def test_p8_a_wrong_step_is_refused_at_once(make: Any, first: int, asked: int) -> None:
    host, (receiver,) = make(first_step=first)
    host.put(first)
    with pytest.raises(ValueError, match=f"wants batch {asked}"):
        receiver.receive(asked, WAIT)


def test_p8_a_rank_cannot_skip_a_batch_or_go_back(make: Any) -> None:
    host, (receiver,) = make()
    for step in (1, 2, 3):
        host.put(step)
    receiver.receive(1, WAIT)
    with pytest.raises(ValueError, match="wants batch 3 after 1"):
        receiver.receive(3, WAIT)
    receiver.receive(2, WAIT)
    with pytest.raises(ValueError, match="wants batch 1 after 2"):
        receiver.receive(1, WAIT)


def test_p8_an_answer_for_another_step_is_refused_by_the_receiver(make: Any) -> None:
    host, (receiver,) = make()
    host.call(host.sender.put(1, [encode_shipment(2, 0, rows(1))]))
    with pytest.raises(ValueError, match="got batch 2"):
        receiver.receive(1, WAIT)


def test_another_number_of_ranks_is_refused(make: Any) -> None:
    host, _ = make(ranks=2)
    stranger = BatchReceiver(host.address, 0, 3)
    with pytest.raises(ValueError, match="packed for 2 ranks"):
        stranger.receive(1, WAIT)
    stranger.close()


def test_after_a_timeout_the_same_step_may_be_asked_again(make: Any) -> None:
    host, (receiver,) = make()
    with pytest.raises(TimeoutError, match="batch 1 did not come"):
        receiver.receive(1, 0.05)
    host.put(1)
    host.put(2)
    assert [marks(receiver.receive(step, WAIT)) for step in (1, 2)] == [[10], [20]]


def test_a_lost_answer_is_given_again(make: Any) -> None:
    host, (receiver,) = make()
    host.put(1)
    receiver.receive(1, WAIT)
    receiver._reconnect()
    assert marks(receiver.receive(1, WAIT)) == [10]


def test_a_batch_is_kept_until_every_rank_asked_for_a_later_one(make: Any) -> None:
    host, (one, two) = make(ranks=2)
    for step in (1, 2, 3):
        host.put(step)
    for step in (1, 2):
        one.receive(step, WAIT)
    assert sorted(host.sender._kept) == [1, 2, 3]
    for step in (1, 2):
        two.receive(step, WAIT)
    assert sorted(host.sender._kept) == [2, 3]


def test_garbage_on_the_socket_is_answered_and_survived(make: Any) -> None:
    host, (receiver,) = make()
    context = zmq.Context()
    stray = context.socket(zmq.DEALER)
    stray.setsockopt(zmq.LINGER, 0)
    stray.connect(host.address)
    stray.send(b"hello")
    assert stray.poll(int(WAIT * 1000)) and b"error" in stray.recv()
    host.put(1)
    assert marks(receiver.receive(1, WAIT)) == [10]
    stray.close()
    context.term()


def test_the_sender_listens_on_loopback_only(make: Any) -> None:
    host, _ = make()
    assert host.address.startswith("tcp://127.0.0.1:")


def test_shipping_out_of_order_is_a_bug(make: Any) -> None:
    host, _ = make()
    with pytest.raises(AssertionError, match="1 is due"):
        host.put(2)
