"""A config as tracker params: flat, as text, without secrets."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from prl.tracking.secrets import redact

# One launch differs from the next here, and the run does not.
PER_LAUNCH = ("run.resume", "run.clean", "dry_run")


def flatten(config: Any) -> dict[str, str]:
    """`optim.lr` -> "0.0001" for every leaf of a typed config; lists as JSON, null as "null"."""
    leaves = _leaves(redact(dataclasses.asdict(config)), "")
    return {path: value for path, value in leaves if path not in PER_LAUNCH}


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict) and tree:
        for key, node in tree.items():
            yield from _leaves(node, f"{path}.{key}" if path else str(key))
    else:
        yield path, tree if isinstance(tree, str) else json.dumps(tree, ensure_ascii=False, default=str)
