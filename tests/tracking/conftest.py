from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, MlflowConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.run_dir import RunDir
from prl.tracking.mlflow_run import Facts
from prl.tracking.mlflow_store import Store, create_database, find_store, locked, quieten_mlflow


@dataclass
class FirstUse:
    """What four threads met that used a store which was not there, beside what a crash had left of it."""

    store: Store
    inodes: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def use(self) -> None:
        assert self.store.database is not None
        try:
            with locked(self.store):
                create_database(self.store)
                self.inodes.append(self.store.database.stat().st_ino)
        except Exception as error:
            self.errors.append(error)


@pytest.fixture(scope="session")
def first_use(tmp_path_factory: pytest.TempPathFactory) -> FirstUse:
    """A sqlite store without runs. MLflow takes seconds to make one, so the tests share it."""
    quieten_mlflow()
    outputs = tmp_path_factory.mktemp("store") / "outputs"
    outputs.mkdir()
    (outputs / ".mlflow.db.growing").write_bytes(b"half a store")
    found = FirstUse(find_store(None, outputs))
    threads = [threading.Thread(target=found.use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.fixture
def store(tmp_path: Path, first_use: FirstUse) -> Store:
    """A store of the test's own, without runs."""
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    assert first_use.store.database is not None
    shutil.copy(first_use.store.database, outputs / "mlflow.db")
    return find_store(None, outputs)


@pytest.fixture
def facts(tmp_path: Path) -> Callable[..., Facts]:
    """What the tracker is told about attempt `attempt` of the run `name`; further fields go to the config."""

    def make(attempt: int = 1, name: str = "r", sweep: Path | None = None, **fields: object) -> Facts:
        run = RunDir(tmp_path / "outputs" / name, attempt)
        run.metrics.mkdir(parents=True, exist_ok=True)
        rest = {"optim": AdamWConfig(lr=1e-4), "algo": GrpoConfig(), **fields}
        config = RlConfig(
            loss=IpoConfig(),
            model=ModelConfig(name="tiny"),
            env={"reverse_text": EnvConfig()},
            scheduler=SchedulerConfig(),
            inference=EmbeddedConfig(),
            tracking=MlflowConfig(),
            **rest,  # type: ignore[arg-type]
        )
        return Facts(run, "rl", config, ["optim.lr=1e-4"], sweep)

    return make


@pytest.fixture
def log_step() -> Callable[..., None]:
    """Appends one line to a stream of a run."""

    def log(run: RunDir, step: int | None, producer: str = "trainer", **values: float) -> None:
        line = {"producer": producer, "step": step, "time": time.time(), **values}
        with run.metric_file(producer).open("a") as file:
            file.write(json.dumps(line) + "\n")

    return log
