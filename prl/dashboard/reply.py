"""JSON answers without a detour: the data are plain already."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.responses import Response


def reply(data: Any) -> Response:
    """`data` as strict JSON; NaN and infinities become null."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"))
    return Response(text, media_type="application/json")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
