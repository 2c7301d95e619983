"""Rows on disk and on the hub: anything with a length and rows by number, never all of it in memory.

JSON lines are read in place by the offset of each line; Parquet, Arrow and hub data sets are memory-mapped
by `datasets`.
"""

from __future__ import annotations

import glob
import json
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from prl.assets import ROOT
from prl.config.sft import RowsDataConfig

BUNDLED = "bundled:"
SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
"""What `save_to_disk` leaves in a folder."""


class Rows(Protocol):
    """Rows by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, number: int) -> dict[str, Any]: ...


class JsonLines:
    """One JSON object a line. The file must not change while it is used."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._starts = array("q")
        offset = 0
        for line in self._file:
            if not line.isspace():
                self._starts.append(offset)
            offset += len(line)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Raises ValueError if the line is not a JSON object."""
        self._file.seek(self._starts[number])
        try:
            return _table(json.loads(self._file.readline()))
        except ValueError as error:
            raise ValueError(f"the line is not a JSON object ({error})") from error


class Listed:
    """Rows of a JSON file that holds a list."""

    def __init__(self, path: Path) -> None:
        rows = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(rows, list):
            raise ValueError(f"{path} holds {type(rows).__name__}, a list of rows is needed")
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return _table(self._rows[number])


class Chained:
    """Several files as one."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(len(part) for part in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, number: int) -> dict[str, Any]:
        part = bisect_right(self._ends, number)
        return self._parts[part][number - (self._ends[part - 1] if part else 0)]


def open_rows(config: RowsDataConfig, subset: str | None, split: str | None) -> Rows:
    """The rows of one subset and split of `config.path`. Raises ValueError when there are none."""
    if config.path.startswith(BUNDLED) or Path(config.path).expanduser().exists() or "*" in config.path:
        rows = _local(_local_path(config.path), subset, split)
    else:
        rows = _from_hub(config, subset, split)
    if not len(rows):
        raise ValueError(f"data.path={config.path}: no rows in subset {subset}, split {split}")
    return rows


def bundled_data() -> list[str]:
    """Names after `bundled:`."""
    return sorted(path.name for path in (ROOT / "data").iterdir() if path.is_dir())


def _local_path(path: str) -> Path:
    if path.startswith(BUNDLED):
        name = path.removeprefix(BUNDLED)
        if name not in bundled_data():
            raise ValueError(f"data.path={path}: prl ships {', '.join(bundled_data())}")
        return ROOT / "data" / name
    return Path(path).expanduser()


def _local(path: Path, subset: str | None, split: str | None) -> Rows:
    if subset is not None:
        path = path / subset
    if any((path / name).is_file() for name in SAVED):
        return _saved(path, split)
    return Chained([_open_file(file) for file in _files(path, split)])


def _files(path: Path, split: str | None) -> list[Path]:
    """Data files of a file, a pattern or a folder, in the order of their names.

    A folder's split are the files whose name, or whose folder's name, begins with it.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
        chosen = [file for file in found if _belongs(file.relative_to(path), split or "train")]
        found = chosen or ([] if split else found)
    else:
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]  # noqa: PTH207
    if not found:
        there = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
        raise ValueError(
            f"data.path={path}: no {'/'.join(SUFFIXES)} file of split {split or 'train'} "
            f"(it holds: {', '.join(there[:8]) or 'nothing'})"
        )
    return found


def _belongs(file: Path, split: str) -> bool:
    return any(part.startswith(split) for part in file.parts)


def _open_file(path: Path) -> Rows:
    if path.suffix == ".json" and _first_character(path) == "[":
        return Listed(path)
    if path.suffix in (".json", ".jsonl"):
        return JsonLines(path)
    from datasets import Dataset

    if path.suffix == ".arrow":
        return Dataset.from_file(str(path))
    if path.suffix == ".parquet":
        return Dataset.from_parquet(str(path))
    raise ValueError(f"data.path={path}: unknown suffix; prl reads {', '.join(SUFFIXES)}")


def _first_character(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.read(64).lstrip()[:1]


def _saved(path: Path, split: str | None) -> Rows:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(str(path))
    if not isinstance(saved, DatasetDict):
        return saved
    if (split or "train") not in saved:
        raise ValueError(f"data.path={path}: no split {split or 'train'}; it has {', '.join(saved)}")
    return saved[split or "train"]


def _from_hub(config: RowsDataConfig, subset: str | None, split: str | None) -> Rows:
    from datasets import load_dataset

    try:
        return load_dataset(config.path, subset, split=split or "train", revision=config.revision)
    except Exception as error:
        raise ValueError(
            f"data.path={config.path}: no file or folder here, and no data set that the hub gives: {error}"
        ) from error


def _table(row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(f"the row is {type(row).__name__}, a table is needed")
    return row
