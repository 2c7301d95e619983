"""Append-only JSON lines: the file that a metric lands in first, and the only one that a run depends on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """One JSON object a line. A line that a crash tore is closed, so that it spoils itself only."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Unbuffered: a crash loses no line that was appended, and a reader never waits for a flush.
        self._file = path.open("a+b", buffering=0)
        self._offset = self._file.seek(0, 2)
        if self._offset and not self._ends_with_newline():
            self._offset += self._file.write(b"\n")

    def append(self, *objects: Any) -> list[tuple[int, int]]:
        """Write `objects`, each on its line; what JSON cannot say becomes text.

        Returns (offset, length) of each line in bytes, newline excluded.
        """
        lines = [_encode(item) for item in objects]
        self._write(b"".join(line + b"\n" for line in lines))
        places = []
        for line in lines:
            places.append((self._offset, len(line)))
            self._offset += len(line) + 1
        return places

    def close(self) -> None:
        self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]

    def _ends_with_newline(self) -> bool:
        self._file.seek(-1, 2)
        return self._file.read(1) == b"\n"


def _encode(value: Any) -> bytes:
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError):
        return json.dumps(_cleaned(value)).encode()


def _cleaned(value: Any) -> Any:
    """`value` as strict JSON: NaN and infinities (a broken reward is worth seeing) become their names."""
    if isinstance(value, Mapping):
        return {str(key): _cleaned(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_cleaned(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if isinstance(value, str | int | float | None) else str(value)


class MetricStream:
    """The metrics of one producer (`orchestrator`, `trainer`) as JSON lines."""

    def __init__(self, path: Path, producer: str) -> None:
        self._lines = JsonLines(path)
        self._producer = producer

    def log(self, values: Mapping[str, float | None], step: int | None = None) -> None:
        """Append one line `{"producer", "step", "time", **values}`; None, NaN and infinities are dropped.

        `step` is None for values on the time axis; `time` is in seconds since the epoch.
        """
        head = {"producer": self._producer, "step": step, "time": time.time()}
        self._lines.append({**head, **dict(_finite(values.items()))})

    def close(self) -> None:
        self._lines.close()


def _finite(items: Iterable[tuple[str, float | None]]) -> Iterable[tuple[str, float]]:
    for name, value in items:
        if value is not None and math.isfinite(number := float(value)):
            yield name, int(number) if isinstance(value, int) else number
