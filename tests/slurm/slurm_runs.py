"""What a run on the test cluster has done so far, by its files."""

from __future__ import annotations

import json
from pathlib import Path


def steps(run: Path) -> list[int]:
    """The optimizer steps that its trainer told of, in the order in which they were made."""
    path = run / "metrics" / "trainer.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "optim/lr" in row]
