"""Documents in the order of a position, tokenised here or ahead of time by worker processes.

Workers get chunks of indices in turn and answer in turn, so the order does not depend on their number. They
speak msgpack over their standard streams and end when their input does.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import cycle, islice
from typing import IO, Any

import msgpack

from prl.config.sft import SftDataConfig
from prl.config.training import ModelConfig
from prl.sft.documents import Document, Documents, build_documents
from prl.sft.position import Position

CHUNK = 16
"""Documents that a worker makes at a time."""
AHEAD = 4
"""Chunks asked of each worker before the first is taken."""
SIZE = struct.Struct("<I")


class Reader:
    """Reads from `position` on, without end, and keeps it where the last delivered document was."""

    def __init__(
        self, data: SftDataConfig, model: ModelConfig, seq_len: int, seed: int, position: Position
    ) -> None:
        self.documents = build_documents(data, model, seq_len, seed)
        self.position = position
        job = {"data": asdict(data), "model": asdict(model), "seq_len": seq_len, "seed": seed}
        self._pool = Pool(job, data.workers) if data.workers else None
        # Listed from a copy: what is read ahead must not move the position, what is delivered does.
        ahead = Position(position.next, position.stride, list(position.pending)).indices()
        make = self._pool.documents if self._pool else partial(map, self.documents.document)
        self._source: Iterator[Document] = make(ahead)

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        """The next document. Raises ValueError naming the row if it is bad."""
        document = next(self._source)
        self.position.advance(document.index)
        return document

    def close(self) -> None:
        """End the workers."""
        if self._pool:
            self._pool.close()


class Pool:
    """Worker processes of one reader."""

    def __init__(self, job: dict[str, Any], workers: int) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        command = [sys.executable, "-m", "prl.sft.worker"]
        self._workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
            for _ in range(workers)
        ]
        for worker in self._workers:
            send(_pipe(worker.stdin), json.dumps(job))

    def documents(self, indices: Iterable[int]) -> Iterator[Document]:
        """The documents of `indices` in their order. Raises ValueError for a bad row or a lost worker."""
        indices = iter(indices)
        turns = cycle(self._workers)
        asked: deque[subprocess.Popen[bytes]] = deque()

        def ask() -> None:
            chunk = list(islice(indices, CHUNK))
            if chunk:
                worker = next(turns)
                send(_pipe(worker.stdin), chunk)
                asked.append(worker)

        for _ in range(AHEAD * len(self._workers)):
            ask()
        while asked:
            answers = receive(_pipe(asked.popleft().stdout))
            if answers is None:
                raise ValueError("a data worker died; its message is above (set data.workers=0 to see more)")
            for answer in answers:
                if isinstance(answer, str):
                    raise ValueError(answer)
                yield unpack(answer)
            ask()

    def close(self) -> None:
        for worker in self._workers:
            _pipe(worker.stdin).close()
            _pipe(worker.stdout).close()
        for worker in self._workers:
            try:
                worker.wait(10)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()


def pack(document: Document) -> list[Any]:
    """A document as msgpack takes it."""
    return [*document[:4], bytes(document.mask), document.truncated]


def unpack(answer: list[Any]) -> Document:
    index, part, name, token_ids, mask, truncated = answer
    return Document(index, part, name, token_ids, [bool(flag) for flag in mask], truncated)


def answer(documents: Documents, indices: list[int]) -> list[Any]:
    """What a worker sends for a chunk: documents, and at the first bad row its message."""
    answers: list[Any] = []
    for index in indices:
        try:
            answers.append(pack(documents.document(index)))
        except ValueError as error:
            return [*answers, str(error)]
    return answers


def send(pipe: IO[bytes], message: Any) -> None:
    data = msgpack.packb(message)
    pipe.write(SIZE.pack(len(data)) + data)
    pipe.flush()


def receive(pipe: IO[bytes]) -> Any:
    """The next message; None at the end of the stream."""
    head = pipe.read(SIZE.size)
    if len(head) < SIZE.size:
        return None
    data = pipe.read(SIZE.unpack(head)[0])
    return msgpack.unpackb(data)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe
