"""An endpoint that is down, refuses the key or serves another model is one line, before any rollout."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest
from chat_engine import ChatEngine, reverse
from evals_lab import make_config

from prl.config.schema import EvalClientConfig
from prl.config.training import ModelConfig
from prl.evals.endpoint import check_endpoint


@pytest.fixture
def engine() -> Iterator[ChatEngine]:
    engine = ChatEngine(reverse, models=["chat", "other"])
    yield engine
    engine.stop()


def check(engine: ChatEngine, **fields: object) -> None:
    asyncio.run(check_endpoint(make_config(**fields), engine.base_url))


def test_a_good_endpoint_passes(engine: ChatEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    check(engine)
    engine.key = "secret"
    monkeypatch.setenv("PRL_API_KEY", "secret")
    check(engine)


def test_headers_are_sent(engine: ChatEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRL_API_KEY", raising=False)
    engine.key = "mine"
    check(engine, client=EvalClientConfig(headers={"Authorization": "Bearer mine"}))


@pytest.mark.parametrize(("key", "held"), [(None, "is not set"), ("wrong", "is set")])
def test_a_refused_key(
    engine: ChatEngine, monkeypatch: pytest.MonkeyPatch, key: str | None, held: str
) -> None:
    engine.key = "secret"
    monkeypatch.setenv("PRL_API_KEY", key) if key else monkeypatch.delenv("PRL_API_KEY", raising=False)
    with pytest.raises(
        ValueError, match=r"client.api_key_var = PRL_API_KEY: .* refuses the key \(401\)"
    ) as caught:
        check(engine)
    assert (
        held in str(caught.value) and "secret" not in str(caught.value) and "wrong" not in str(caught.value)
    )


def test_another_model(engine: ChatEngine) -> None:
    with pytest.raises(ValueError, match=r"does not serve it; did you mean chat\? it serves chat, other"):
        check(engine, model=ModelConfig(name="chatt"))


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        with pytest.raises(ConnectionError, match=rf"client.base_url = {url}: no answer") as caught:
            asyncio.run(check_endpoint(make_config(), url))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "error"), [(500, ConnectionError), (429, ConnectionError), (404, None), (405, None)]
)
def test_other_statuses(engine: ChatEngine, status: int, error: type[Exception] | None) -> None:
    engine.listing_status = status
    if error is None:
        check(engine)
        return
    with pytest.raises(error, match=f"answers {status}"):
        check(engine)
