"""The trainer's end of the batch transport: blocking, one request for one step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Protocol

import zmq

from prl.orchestrator.file_transport import SCHEME, batch_file
from prl.orchestrator.wire import Want, decode_shipment, encode_want
from prl.records import MicroBatch

FILE_POLL_SECONDS = 0.05


class Receiver(Protocol):
    """What the trainer needs of a transport."""

    def receive(self, step: int, timeout: float) -> list[MicroBatch]: ...

    def close(self) -> None: ...


def open_receiver(address: str, rank: int, world: int) -> Receiver:
    """The receiver for what the orchestrator published: `tcp://...` or `file://...`."""
    if address.startswith(SCHEME):
        return FileReceiver(Path(address.removeprefix(SCHEME)), rank)
    return BatchReceiver(address, rank, world)


class FileReceiver:
    """Reads this rank's micro batches from `batches/step_N/rank_R.bin`."""

    def __init__(self, directory: Path, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def receive(self, step: int, timeout: float) -> list[MicroBatch]:
        """As `BatchReceiver.receive`."""
        path = batch_file(self._directory, step, self._rank)
        deadline = time.monotonic() + timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self._rank}: batch {step} did not come within {timeout:.0f} s")
            time.sleep(FILE_POLL_SECONDS)
        return _micro_batches(path.read_bytes(), step, self._rank)

    def close(self) -> None:
        """Nothing is held open."""


class BatchReceiver:
    """Pulls this rank's micro batches from the orchestrator, step by step."""

    def __init__(self, address: str, rank: int, world: int) -> None:
        self._address = address
        self._rank = rank
        self._world = world
        self._context = zmq.Context()
        self._socket = self._connect()

    def receive(self, step: int, timeout: float) -> list[MicroBatch]:
        """The micro batches of batch `step` for this rank, at least one.

        Raises TimeoutError when the batch did not come within `timeout` seconds (asking again is allowed) and
        ValueError when the orchestrator refuses the step or answers with another one.
        """
        self._socket.send(encode_want(Want(step, self._rank, self._world)))
        if not self._socket.poll(int(timeout * 1000)):
            self._reconnect()
            raise TimeoutError(f"rank {self._rank}: batch {step} did not come within {timeout:.0f} s")
        return _micro_batches(self._socket.recv(), step, self._rank)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self._address)
        return socket

    def _reconnect(self) -> None:
        """A late answer to the old request must never be taken for the answer to the next one."""
        self._socket.close()
        self._socket = self._connect()


def _micro_batches(message: bytes, step: int, rank: int) -> list[MicroBatch]:
    shipment = decode_shipment(message)
    if (shipment.step, shipment.rank) != (step, rank):
        raise ValueError(f"rank {rank} wants batch {step}, got batch {shipment.step} of rank {shipment.rank}")
    return shipment.micro_batches
