"""Which version to apply next, read without torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from prl.records import WeightVersion
from prl.sync.versions import MARKER, newest_version, next_version, read_version


def publish(broadcasts: Path, *versions: int, complete: bool = True) -> None:
    for version in versions:
        path = broadcasts / f"step_{version}"
        path.mkdir(parents=True)
        if complete:
            (path / MARKER).write_text(
                json.dumps(asdict(WeightVersion(version, "/elsewhere", f"p{version}", 8)))
            )


def applied(broadcasts: Path, now: int, *wanted: int) -> int | None:
    found = next_version(broadcasts, now, lambda version: version in wanted)
    return found.version if found else None


def test_the_newest_unless_somebody_wants_one_before_it(tmp_path: Path) -> None:
    publish(tmp_path, 3, 4, 5, 11)
    assert applied(tmp_path, 3) == 11
    assert applied(tmp_path, 3, 4, 5) == 4, "the oldest that is wanted"
    assert applied(tmp_path, 4, 4, 5) == 5
    assert applied(tmp_path, 5, 3, 4, 5, 9) == 11, "neither what was applied nor what is not there"


def test_what_is_not_complete_is_not_there(tmp_path: Path) -> None:
    assert newest_version(tmp_path / "absent") is None and applied(tmp_path, 0) is None
    publish(tmp_path, 1)
    publish(tmp_path, 2, 3, complete=False)
    assert applied(tmp_path, 0, 2) == 1
    with pytest.raises(FileNotFoundError):
        read_version(tmp_path, 2)


def test_a_moved_run_is_read_where_it_lies(tmp_path: Path) -> None:
    publish(tmp_path, 7)
    found = read_version(tmp_path, 7)
    assert (found.path, found.fingerprint) == (str(tmp_path / "step_7"), "p7")
