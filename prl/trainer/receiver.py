"""The trainer's end of the batch socket: blocking, one request for one step."""

from __future__ import annotations

import zmq

from prl.orchestrator.wire import Want, decode_shipment, encode_want
from prl.records import MicroBatch


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
        shipment = decode_shipment(self._socket.recv())
        if (shipment.step, shipment.rank) != (step, self._rank):
            raise ValueError(
                f"rank {self._rank} wants batch {step}, got batch {shipment.step} of rank {shipment.rank}"
            )
        return shipment.micro_batches

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
