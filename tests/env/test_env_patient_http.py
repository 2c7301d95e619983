"""`Retry-After` is obeyed below verifiers' text-only client."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from prl.env import patient_http
from prl.env.patient_http import TRIES, PatientTransport, retry_after


class Script(httpx.AsyncBaseTransport):
    """Answers with the scripted (status, headers) pairs, one after the other; the last one for ever."""

    def __init__(self, *answers: tuple[int, dict[str, str]]) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(request.content)
        status, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return httpx.Response(status, headers=headers, content=b"{}", request=request)


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []

    async def sleep(seconds: float) -> None:
        found.append(seconds)

    monkeypatch.setattr(patient_http, "asyncio", SimpleNamespace(sleep=sleep))
    return found


def post(script: Script) -> httpx.Response:
    async def run() -> httpx.Response:
        async with httpx.AsyncClient(transport=PatientTransport(script)) as client:
            return await client.post("http://engine/v1", content=b"question")

    return asyncio.run(run())


def test_it_waits_as_told_and_asks_again(pauses: list[float]) -> None:
    script = Script((429, {"retry-after": "2"}), (503, {"retry-after": "0.5"}), (200, {}))
    assert post(script).status_code == 200
    assert pauses == [2.0, 0.5]
    assert script.bodies == [b"question"] * 3


def test_without_the_header_the_answer_is_passed_on(pauses: list[float]) -> None:
    for answer in ((429, {}), (500, {"retry-after": "1"}), (429, {"retry-after": "soon"})):
        script = Script(answer)
        assert post(script).status_code == answer[0]
        assert len(script.bodies) == 1
    assert pauses == []


def test_patience_has_an_end(pauses: list[float]) -> None:
    assert post(Script((429, {"retry-after": "3600"}))).status_code == 429
    assert pauses == []
    script = Script((429, {"retry-after": "1"}))
    assert post(script).status_code == 429
    assert len(script.bodies) == TRIES + 1


def test_dates_are_read() -> None:
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    assert retry_after(later) == pytest.approx(30, abs=2)
    assert retry_after(format_datetime(datetime.now(UTC) - timedelta(hours=1), usegmt=True)) == 0.0
    assert retry_after("Sun, 06 Nov 1994 08:49:37 -0000") == 0.0
    assert retry_after(None) is None and retry_after("-3") == 0.0


def test_the_text_only_client_is_patient_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from verifiers.v1.clients import eval as eval_client
    from verifiers.v1.configs.client import EvalClientConfig

    monkeypatch.setattr(eval_client, "build_async_httpx", eval_client.build_async_httpx)
    patient_http.use_patient_http()
    patient_http.use_patient_http()
    client: Any = eval_client.EvalClient(EvalClientConfig(base_url="http://127.0.0.1:1/v1"))
    transport = client.client._transport
    assert isinstance(transport, PatientTransport) and not isinstance(transport._inner, PatientTransport)
