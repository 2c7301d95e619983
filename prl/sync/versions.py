"""Which versions of the weights lie in `broadcasts/`, for readers that need no tensors (and import no torch).

A version is complete once its marker is there; `prl.sync.filesystem` writes it last.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from prl.records import WeightVersion
from prl.run_dir import write_atomic

MARKER = "COMPLETE.json"
POLL_SECONDS = 0.001
_STEP = re.compile(r"step_(\d+)$")


def newest_version(broadcasts: Path) -> WeightVersion | None:
    """The newest complete version, or None while there is none."""
    return _first_complete(broadcasts, reversed(versions_on_disk(broadcasts)))


def next_version(broadcasts: Path, applied: int, wanted: Callable[[int], bool]) -> WeightVersion | None:
    """The version to apply after `applied`: the oldest newer one that is `wanted`, else the newest.

    Versions between two looks are skipped unless somebody wants them. None while there is none at all.
    """
    newer = [v for v in versions_on_disk(broadcasts) if v > applied and wanted(v)]
    return _first_complete(broadcasts, newer) or newest_version(broadcasts)


def read_version(broadcasts: Path, version: int) -> WeightVersion:
    """A complete version. Raises FileNotFoundError when it is absent or not complete."""
    directory = broadcasts / f"step_{version}"
    fields = json.loads((directory / MARKER).read_text())
    return WeightVersion(**{**fields, "path": str(directory)})


def mark_complete(version: WeightVersion) -> None:
    """Write the marker of a version; again when more is known of it."""
    write_atomic(Path(version.path) / MARKER, json.dumps(asdict(version)))


def awaited_fingerprint(published: WeightVersion, timeout: float) -> str:
    """The fingerprint of a version. That of a broadcast joins its marker when the last bytes have left the
    trainer: waits for it (blocking), and raises TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    directory = Path(published.path)
    while ":" not in published.fingerprint:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"the trainer did not say within {timeout:g} s what v{published.version} holds"
            )
        time.sleep(POLL_SECONDS)
        published = read_version(directory.parent, published.version)
    return published.fingerprint


def published_mode(directory: Path) -> str | None:
    """How a version's fingerprint was made (`sampled` or `full`); None for weights that nobody published."""
    try:
        return json.loads((directory / MARKER).read_text())["fingerprint"].partition(":")[0]
    except FileNotFoundError:
        return None


def versions_on_disk(broadcasts: Path) -> list[int]:
    """Versions with a directory, complete or not, in ascending order."""
    if not broadcasts.is_dir():
        return []
    return sorted(int(match[1]) for entry in broadcasts.iterdir() if (match := _STEP.match(entry.name)))


def _first_complete(broadcasts: Path, versions: Iterable[int]) -> WeightVersion | None:
    for version in versions:
        try:
            return read_version(broadcasts, version)
        except FileNotFoundError:
            continue  # still being written, or just removed
    return None
