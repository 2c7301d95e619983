"""A fake engine, a real environment server in its own process, and a client of it; all loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from env_server_process import ServerProcess, make_config
from fake_engine import FakeEngine, oracle

from prl.config import sources


@pytest.fixture(scope="session")
def engine() -> Iterator[FakeEngine]:
    engine = FakeEngine(oracle)
    yield engine
    engine.stop()


@pytest.fixture(autouse=True)
def reset_engine(request: pytest.FixtureRequest) -> None:
    if "engine" in request.fixturenames:
        engine = request.getfixturevalue("engine")
        engine.answer, engine.latency, engine.finish = oracle, 0.0, None
        engine.requests.clear()


@pytest.fixture(scope="session")
def scripted_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serves `scripted_tasks`, a module of the user's own on PYTHONPATH."""
    config = make_config(scripted_tasks=sources.EnvConfig())
    server = ServerProcess(tmp_path_factory.mktemp("scripted"), config, "scripted_tasks")
    yield server
    server.close()


@pytest.fixture
def reverse_text_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    """A server of the test's own, to be harmed; parametrize it with the number of workers."""
    config = make_config(reverse_text=sources.EnvConfig(workers=getattr(request, "param", 1)))
    server = ServerProcess(tmp_path / "run", config, "reverse_text")
    yield server
    server.close()
