"""Where MLflow keeps runs: by default one sqlite file beside the runs, made once, one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SQLITE = "sqlite:///"
LOCK_SECONDS = 60.0


@dataclass(frozen=True)
class Store:
    """A tracking store. `database` is set for a sqlite file, which needs a lock and a place for artifacts."""

    uri: str
    artifacts: Path
    database: Path | None = None

    @property
    def ui_command(self) -> str:
        """The command that opens the MLflow UI for this store."""
        if self.uri.startswith(("http://", "https://")):
            return f"the MLflow server at {self.uri}"
        return f"mlflow ui --backend-store-uri {shlex.quote(self.uri)}"


def find_store(uri: str | None, output_dir: Path) -> Store:
    """The store that `tracking.uri` names; null is `mlflow.db` in `output_dir`. Paths become absolute."""
    artifacts = output_dir.resolve() / "mlartifacts"
    if uri is not None and not uri.startswith(SQLITE):
        return Store(uri, artifacts)
    path = output_dir / "mlflow.db" if uri is None else Path(uri.removeprefix(SQLITE))
    database = path.expanduser().resolve()
    return Store(f"{SQLITE}{database}", artifacts, database)


@contextlib.contextmanager
def locked(store: Store, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Exclusive use of a sqlite store among prl's writers; nothing to do for other stores.

    Writers that queue here are several times faster than writers that collide in sqlite.
    Raises TimeoutError.
    """
    if store.database is None:
        yield
        return
    store.database.parent.mkdir(parents=True, exist_ok=True)
    with store.database.with_suffix(".lock").open("a") as lock:
        _claim(lock.fileno(), timeout)
        yield


def quieten_mlflow() -> None:
    """Before mlflow is imported: no telemetry, no log handlers, no minutes of retries inside one call."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_CONFIGURE_LOGGING", "false")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")


def create_database(store: Store) -> None:
    """Make the sqlite file if there is none; call with the store locked.

    MLflow builds the schema by some sixty migrations: that happens under another name, so that nobody
    ever opens half a store.
    """
    if store.database is None or store.database.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    growing = store.database.with_name(f".{store.database.name}.growing")
    growing.unlink(missing_ok=True)
    SqlAlchemyStore(f"{SQLITE}{growing}", str(store.artifacts)).engine.dispose()
    growing.rename(store.database)


def _claim(descriptor: int, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(f"other writers held the MLflow store for {timeout:.0f} s") from None
            time.sleep(0.05)
