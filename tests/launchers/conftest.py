from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from launchers.interrupts import Interrupts
from launchers.placement import Kind, Role
from prl.checkpoint.marker import mark_complete
from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig, RunConfig
from prl.config.serving import EmbeddedConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.run_dir import RunDir

DUMMY = Path(__file__).with_name("dummy_role.py")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.configs.mkdir(parents=True)
    run.logs.mkdir(parents=True)
    return run


@pytest.fixture
def interrupts() -> Interrupts:
    """Never entered: a test sets `signum` and `count` itself."""
    return Interrupts()


@pytest.fixture
def role() -> Callable[..., Role]:
    def make(name: str, kind: Kind, *behaviour: str, **fields: object) -> Role:
        argv = (sys.executable, "-S", str(DUMMY), *behaviour)
        return Role(name, kind, argv, **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def wait_until() -> Callable[[Callable[[], bool], float], None]:
    def wait(condition: Callable[[], bool], timeout: float = 10.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.02)

    return wait


@pytest.fixture
def gone() -> Callable[[int], bool]:
    def is_gone(pid: int) -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    return is_gone


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RlConfig]:
    """A typed config of a run `r` below `tmp_path/outputs`; `run_` fields go to `config.run`."""

    def make(**fields: object) -> RlConfig:
        own = {key.removeprefix("run_"): fields.pop(key) for key in list(fields) if key.startswith("run_")}
        rest = {"tracking": TrackingConfig(), "output_dir": str(tmp_path / "outputs"), **fields}
        return RlConfig(
            algo=GrpoConfig(),
            loss=IpoConfig(),
            model=ModelConfig(name="tiny"),
            env={"reverse_text": EnvConfig()},
            optim=AdamWConfig(),
            scheduler=SchedulerConfig(),
            inference=EmbeddedConfig(),
            run=RunConfig(**({"name": "r"} | own)),  # type: ignore[arg-type]
            **rest,  # type: ignore[arg-type]
        )

    return make


@pytest.fixture
def checkpoint() -> Callable[[Path, int], Path]:
    """Makes a complete checkpoint of one step below a directory of checkpoints."""

    def make(checkpoints: Path, step: int) -> Path:
        directory = checkpoints / f"step_{step}"
        for part in ("trainer", "orchestrator"):
            (directory / part).mkdir(parents=True)
            (directory / part / "state").write_text("x")
        mark_complete(directory)
        return directory

    return make
