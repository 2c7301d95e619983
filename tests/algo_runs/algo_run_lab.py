"""Whole runs from the command line, small ones, and what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SMALL = ["max_steps=2", "rollout.batch_size=8", "rollout.group_size=4", "tracking=none", "log.display=plain"]


def environment(*paths: Path, **variables: str) -> dict[str, str]:
    """Environment in which the checkout and `paths` are importable."""
    kept = {key: value for key, value in os.environ.items() if key != "PRL_OUTPUT_DIR"}
    places = [str(ROOT), *map(str, paths), *sys.path]
    return {**kept, "PYTHONPATH": os.pathsep.join(places), **variables}


def prl(
    directory: Path, *words: str, paths: tuple[Path, ...] = (), timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """`python -m prl words...` in `directory`."""
    return subprocess.run(
        [sys.executable, "-m", "prl", *words],
        cwd=directory,
        env=environment(*paths),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def finished(directory: Path, name: str, *words: str, **options: Any) -> Path:
    """Directory of a small run that ended well."""
    done = prl(directory, f"run.name={name}", *SMALL, *words, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / "outputs" / name


def rows(run: Path, producer: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics" / f"{producer}.jsonl").read_text().splitlines()]


def values(run: Path, producer: str, key: str) -> list[float]:
    """A metric, one value a step."""
    return [row[key] for row in rows(run, producer) if key in row]


def episodes(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "traces" / "stream.jsonl").read_text().splitlines()]
