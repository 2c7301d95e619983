"""Configs of attempts and of several runs beside each other, flat and without secrets."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from prl.dashboard.catalog import Run
from prl.tracking.secrets import redact_override

ABSENT = None


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`optim.lr` -> `0.0001` for every leaf; lists and empty tables as JSON."""
    leaves: dict[str, str] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{path}.")
        else:
            leaves[path] = value if isinstance(value, str) else json.dumps(value, default=str)
    return leaves


def differences(configs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Paths at which flat configs do not all agree, with the value of each (None: it has no such path)."""
    paths = sorted({path for config in configs for path in config})
    rows = [{"path": path, "values": [config.get(path, ABSENT) for config in configs]} for path in paths]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def command_of(run: Run, attempt: int) -> str:
    """The command line that launched an attempt; secrets in overrides are hidden."""
    path = run.inside(run.path / "configs" / f"attempt_{attempt}" / "command.txt")
    if path is None:
        return ""
    first, newline, rest = path.read_text(errors="replace").partition("\n")
    try:
        words = shlex.split(first)
    except ValueError:  # not a command line: nothing that could be hidden would be recognised
        return ""
    return shlex.join(map(redact_override, words)) + newline + rest
