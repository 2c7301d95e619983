"""Batches to the trainer: a ROUTER socket that each trainer rank pulls from, step by step."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import zmq
import zmq.asyncio

from prl.orchestrator.wire import Want, decode_want, encode_refusal
from prl.run_dir import bind_address

log = logging.getLogger(__name__)


class BatchSender:
    """Keeps each batch until every rank has fetched it; parks requests for the next; refuses any other step.

    A rank asks for its steps one after the other. It may ask again for the one it asked for last (it lost
    the answer) and gets the same bytes; only its request for the next one proves that it has this one.
    """

    def __init__(self, ranks: int, first_step: int) -> None:
        self._first_step = self._next_step = first_step
        self._asked = [first_step - 1] * ranks
        self._kept: dict[int, Sequence[bytes]] = {}
        self._parked: dict[int, bytes] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)

    def bind(self, host: str | None = None) -> str:
        """Listen on a free port. Returns the address, `tcp://host:port`."""
        self._socket.bind(f"tcp://{host or bind_address()}:*")
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    async def serve(self) -> None:
        """Answer requests until cancelled."""
        while True:
            peer, message = (await self._socket.recv_multipart())[:2]
            await self._answer(peer, message)

    async def put(self, step: int, messages: Sequence[bytes]) -> None:
        """Ship the batch of `step`: one encoded message per rank. Never waits for the trainer."""
        assert step == self._next_step, f"batch {step} shipped, {self._next_step} is due"
        assert len(messages) == len(self._asked), f"{len(messages)} messages for {len(self._asked)} ranks"
        self._kept[step] = messages
        self._next_step = step + 1
        parked, self._parked = self._parked, {}
        for rank, peer in parked.items():
            await self._socket.send_multipart([peer, messages[rank]], copy=False)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    async def _answer(self, peer: bytes, message: bytes) -> None:
        try:
            want = decode_want(message)
            self._admit(want)
        except ValueError as error:
            log.error("batch socket: refused a request: %s", error)
            await self._socket.send_multipart([peer, encode_refusal(str(error))])
            return
        if want.step == self._next_step:
            self._parked[want.rank] = peer
        else:
            await self._socket.send_multipart([peer, self._kept[want.step][want.rank]], copy=False)

    def _admit(self, want: Want) -> None:
        """Note what a rank asks for, drop what every rank has. Raises ValueError on a wrong step or world."""
        ranks = len(self._asked)
        if want.world != ranks or not 0 <= want.rank < ranks:
            raise ValueError(f"rank {want.rank} of {want.world} asked, batches are packed for {ranks} ranks")
        last = self._asked[want.rank]
        if want.step not in (last, last + 1) or not self._first_step <= want.step <= self._next_step:
            raise ValueError(
                f"rank {want.rank} wants batch {want.step} after {last}; next is {self._next_step}"
            )
        self._asked[want.rank] = want.step
        for step in [step for step in self._kept if step < min(self._asked)]:
            del self._kept[step]
