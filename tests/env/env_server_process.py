"""A real environment server in its own process, and the config that it starts from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from prl.config import algo, loss, serving, sources, training
from prl.config.load import dump_resolved
from prl.config.schema import RlConfig
from prl.run_dir import RunDir

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
START_SECONDS = 300.0
"""Far above the 6 s that a start takes on a free machine."""


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
        return self.run.wait_for_address_blocking(self.role, START_SECONDS)

    def terminate(self) -> tuple[int, float]:
        """(exit code, seconds it took) after SIGTERM."""
        started = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30), time.monotonic() - started

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self.log.close()
