"""The body of `/init_broadcaster`, the same for both engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def join_arguments(body: Mapping[str, Any]) -> tuple[str, int, str, int, int, float]:
    """(host, port, session, rank, workers, time-out) of an `/init_broadcaster` body, checked."""
    kinds = {
        "host": str,
        "port": int,
        "session_id": str,
        "rank_offset": int,
        "inference_world_size": int,
        "timeout": (int, float),
    }
    for key, kind in kinds.items():
        if not isinstance(body.get(key), kind) or isinstance(body.get(key), bool):
            raise ValueError(f"init_broadcaster needs {key}; it takes {', '.join(kinds)}")
    host, port, session, rank, workers, timeout = (body[key] for key in kinds)
    if not 1 <= rank <= workers:
        raise ValueError(f"rank_offset={rank}: must be in [1, inference_world_size={workers}]")
    return host, port, session, rank, workers, float(timeout)
