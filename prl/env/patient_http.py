"""Endpoints that say when to come back (`Retry-After`) are asked again then.

verifiers' text-only client answers 429 and 503 with an error that has lost the header, so that whoever
repeats the rollout can only guess. The header is obeyed here, below the client, where it still is.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from verifiers.v1.clients import eval as eval_client

log = logging.getLogger(__name__)

STATUS = (429, 503)
TRIES = 3
LONGEST = 60.0
"""Seconds; an endpoint that asks for more is left to the retries of the evaluation."""


def use_patient_http() -> None:
    """Make the text-only rollouts of this process obey `Retry-After`."""
    build = eval_client.build_async_httpx
    if getattr(build, "patient", False):
        return

    def build_patient(config: Any) -> httpx.AsyncClient:
        client = build(config)
        client._transport = PatientTransport(client._transport)
        return client

    build_patient.patient = True  # type: ignore[attr-defined]
    eval_client.build_async_httpx = build_patient


class PatientTransport(httpx.AsyncBaseTransport):
    """Waits as told and sends the request again, up to `TRIES` times."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        for _ in range(TRIES):
            response = await self._inner.handle_async_request(request)
            pause = (
                retry_after(response.headers.get("retry-after")) if response.status_code in STATUS else None
            )
            if pause is None or pause > LONGEST:
                return response
            await response.aclose()
            log.warning("%s answers %d: waiting %.1f s as it asks", request.url, response.status_code, pause)
            await asyncio.sleep(pause)
        return await self._inner.handle_async_request(request)

    async def aclose(self) -> None:
        await self._inner.aclose()


def retry_after(value: str | None) -> float | None:
    """Seconds from now that the header asks for (RFC 9110, 10.2.3: seconds or a date); None if unreadable."""
    if not value:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(value)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
