"""A fake engine, a real environment server in its own process, and a client of it; all loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine, oracle

from prl.config import algo, loss, serving, sources, training
from prl.config.load import dump_resolved
from prl.config.schema import RlConfig
from prl.run_dir import RunDir

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def make_config(**envs: sources.EnvConfig) -> RlConfig:
    return RlConfig(
        algo=algo.GrpoConfig(),
        loss=loss.IpoConfig(),
        model=training.ModelConfig(name="tiny"),
        env=envs,
        optim=training.AdamWConfig(),
        scheduler=training.SchedulerConfig(),
        inference=serving.EmbeddedConfig(),
        tracking=serving.TrackingConfig(),
    )


class ServerProcess:
    """`python -m launchers.role env/<name>`, as the supervisor starts it."""

    def __init__(self, directory: Path, config: RlConfig, name: str) -> None:
        self.run, self.role = RunDir(directory), f"env/{name}"
        self.run.configs.mkdir(parents=True)
        self.run.resolved_config.write_text(dump_resolved("rl", config))
        command = [sys.executable, "-m", "launchers.role", self.role, str(self.run.resolved_config)]
        paths = os.pathsep.join([str(ROOT), str(HERE)])
        self.log = (directory / "server.log").open("w+")
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, cwd=directory, stdout=self.log, stderr=self.log
        )

    def address(self) -> str:
        return self.run.wait_for_address_blocking(self.role, 120)

    def terminate(self) -> tuple[int, float]:
        """(exit code, seconds it took) after SIGTERM."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30), time.monotonic() - started

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)


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
    if server.process.poll() is None:
        server.kill()
