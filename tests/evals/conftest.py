"""One scripted endpoint and one real environment server for the whole session; all loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from chat_engine import ChatEngine, reverse
from evals_lab import make_config, role_environment

from prl.config.load import dump_resolved
from prl.config.sources import EnvConfig
from prl.run_dir import RunDir


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[ChatEngine]:
    engine = ChatEngine(reverse)
    yield engine
    engine.stop()


@pytest.fixture
def chat(shared_engine: ChatEngine) -> ChatEngine:
    """The endpoint, as new."""
    shared_engine.answer, shared_engine.latency, shared_engine.key = reverse, 0.0, None
    shared_engine.listing_status, shared_engine.most_inflight = 200, 0
    shared_engine.requests.clear()
    return shared_engine


@pytest.fixture(scope="session")
def env_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of `python -m launchers.role env/reverse_text`, serving text-only episodes."""
    run = RunDir(tmp_path_factory.mktemp("env_server"))
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("eval", make_config(env={"reverse_text": EnvConfig()})))
    command = [sys.executable, "-m", "launchers.role", "env/reverse_text", str(run.resolved_config)]
    with (run.path / "log").open("w") as log:
        process = subprocess.Popen(command, env=role_environment(), cwd=run.path, stdout=log, stderr=log)
    try:
        yield run.wait_for_address_blocking("env/reverse_text", 180)
    finally:
        process.kill()
        process.wait(10)
