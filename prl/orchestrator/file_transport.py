"""Batches to the trainer through files: `batches/step_N/rank_R.bin`, each visible only when whole.

For trainers that reach the orchestrator by a shared directory and not by a socket. The content is that of the
batch socket, so the receiver refuses a wrong step or rank in the same way.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

SCHEME = "file://"
KEPT_BEHIND = 1
"""Batch s leaves when the engines serve v(s - 2), so every rank has read batch s - 2 by then."""


class FileSender:
    """Writes each batch, removes those that every rank has trained on, and at first an older attempt's."""

    def __init__(self, directory: Path, ranks: int, first_step: int) -> None:
        self._directory = directory
        self._ranks = ranks
        self._next_step = first_step

    def bind(self) -> str:
        """Make the directory, empty. Returns its address, `file:///path`."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir(parents=True)
        return f"{SCHEME}{self._directory.resolve()}"

    async def serve(self) -> None:
        """Files answer for themselves; runs until cancelled."""
        await asyncio.Event().wait()

    async def put(self, step: int, messages: Sequence[bytes]) -> None:
        """Ship the batch of `step`: one encoded message per rank."""
        assert step == self._next_step, f"batch {step} shipped, {self._next_step} is due"
        assert len(messages) == self._ranks, f"{len(messages)} messages for {self._ranks} ranks"
        self._next_step = step + 1
        await asyncio.to_thread(self._write, step, messages)

    def close(self) -> None:
        """The last batches stay: a rank may still be about to read them."""

    def _write(self, step: int, messages: Sequence[bytes]) -> None:
        for rank, message in enumerate(messages):
            path = batch_file(self._directory, step, rank)
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
            temporary.write_bytes(message)
            temporary.replace(path)
        for entry in self._directory.iterdir():
            match = re.fullmatch(r"step_(\d+)", entry.name)
            if match and int(match[1]) < step - KEPT_BEHIND:
                shutil.rmtree(entry)


def batch_file(directory: Path, step: int, rank: int) -> Path:
    return directory / f"step_{step}" / f"rank_{rank}.bin"
