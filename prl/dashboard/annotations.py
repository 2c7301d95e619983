"""What was learned of a trace after it was sampled: its credit, and the trainer's logprobs of its tokens.

`traces/annotations.jsonl` (orchestrator) and `traces/trainer_<rank>.jsonl` have one line a trained trace.
Only the places of the lines are kept, by the trace's id.
"""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

from prl.dashboard.catalog import Run

CHUNK_BYTES = 1 << 21
_TRACE = re.compile(rb'"trace": ?"([^"]+)"')


class Annotations:
    """Places of the lines of every annotation file, by trace; files are read where they grew."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._read: dict[Path, tuple[int, int]] = {}
        self._places: dict[Path, dict[bytes, list[tuple[int, int]]]] = {}

    def credit(self, trace_id: str) -> dict[str, Any] | None:
        """The newest line that the orchestrator wrote of a trace: `step`, `advantage`, `advantages`."""
        lines = self._lines("traces/annotations.jsonl", trace_id)
        return lines[-1] if lines else None

    def trainer(self, trace_id: str) -> list[dict[str, Any]]:
        """The samples of the newest step that trained a trace: `tokens` of each, and its `logprobs`."""
        lines = self._lines("traces/trainer_*.jsonl", trace_id)
        newest = max((line["step"] for line in lines), default=None)
        return [line for line in lines if line["step"] == newest]

    def _lines(self, pattern: str, trace_id: str) -> list[dict[str, Any]]:
        lines = []
        for path in self._run.files(pattern):
            with self._lock:
                self._refresh(path)
                places = self._places[path].get(trace_id.encode(), [])
            with path.open("rb") as file:
                for offset, length in places:
                    file.seek(offset)
                    lines.append(json.loads(file.read(length)))
        return lines

    def _refresh(self, path: Path) -> None:
        told = path.stat()
        inode, start = self._read.get(path, (0, 0))
        if inode != told.st_ino or told.st_size < start:  # another run took the directory
            start, self._places[path] = 0, {}
        with path.open("rb") as file:
            file.seek(start)
            while data := file.read(CHUNK_BYTES):
                data += b"" if data.endswith(b"\n") else file.readline()
                start = self._note(self._places[path], data[: data.rfind(b"\n") + 1], start)
        self._read[path] = (told.st_ino, start)

    def _note(self, places: dict[bytes, list[tuple[int, int]]], lines: bytes, start: int) -> int:
        for line in lines.splitlines(keepends=True):
            found = _TRACE.search(line, 0, 400)
            if found and line.endswith(b"}\n"):
                places.setdefault(found[1], []).append((start, len(line)))
            start += len(line)
        return start
