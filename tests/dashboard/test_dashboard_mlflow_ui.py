"""Four children of a sweep beside each other where researchers compare runs already: MLflow's own page.

Real parts: prl's writer, a sqlite store, `mlflow server`, Chromium.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser_lab import PROGRAM, needs_browser, picture
from cdp import browser
from synthetic_runs import Shape, write_run

from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, MlflowConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.run_dir import RunDir
from prl.tracking.mlflow_run import Facts
from prl.tracking.mlflow_store import Store, find_store
from prl.tracking.mlflow_writer import MlflowWriter

pytestmark = needs_browser

WAIT_SECONDS = 600.0
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
REWARD = "train/agg/effective/agent/reward/mean"


def element(sweep: Path, number: int, rate: float) -> Facts:
    """One element of the sweep: its run directory and what the tracker is told of it."""
    write_run(sweep / str(number), Shape(episodes=640, lr=rate, seed=number, speed=0.5 + 0.4 * number))
    config = RlConfig(
        algo=GrpoConfig(),
        loss=IpoConfig(),
        model=ModelConfig(name="tiny"),
        env={"reverse_text": EnvConfig()},
        optim=AdamWConfig(lr=rate),
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        tracking=MlflowConfig(traces_per_step=0),
    )
    return Facts(RunDir(sweep / str(number)), "rl", config, [f"optim.lr={rate}"], sweep)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A store into which prl's own writer put four finished runs and their parent."""
    root = tmp_path_factory.mktemp("mlflow")
    found = find_store(None, root)
    for number, rate in enumerate(RATES):
        said: list[str] = []
        writer = MlflowWriter(element(root / "sweep", number, rate), found, said.append, interval=0.1)
        writer.start()
        assert writer.close("FINISHED", WAIT_SECONDS), said
    return found


@pytest.fixture(scope="module")
def server(store: Store) -> Iterator[str]:
    """The url of a real MLflow server on that store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        "--backend-store-uri",
        store.uri,
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--host", "127.0.0.1", "--workers", "1"],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + WAIT_SECONDS
        while not answers(f"{url}/health"):
            assert process.poll() is None, "the MLflow server ended"
            assert time.monotonic() < deadline, "the MLflow server did not start"
            time.sleep(0.3)
        yield url
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_the_children_of_a_sweep_are_compared_in_mlflow(store: Store, server: str, tmp_path: Path) -> None:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(store.uri)
    experiment = client.get_experiment_by_name("prl").experiment_id
    runs = client.search_runs([experiment])
    parents = {run.data.tags.get("mlflow.parentRunId") for run in runs} - {None}
    children = sorted(
        (run for run in runs if "mlflow.parentRunId" in run.data.tags), key=lambda run: run.info.run_name
    )
    assert len(parents) == 1 and [run.info.run_name for run in children] == ["0", "1", "2", "3"]
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert [float(run.data.params["optim.lr"]) for run in children] == list(RATES)
    assert all(len(client.get_metric_history(run.info.run_id, REWARD)) == 20 for run in children)
    quoted = urllib.parse.quote(json.dumps([run.info.run_id for run in children]))
    page_url = (
        f"{server}/#/compare-runs?runs={quoted}&experiments={urllib.parse.quote(json.dumps([experiment]))}"
    )

    async def look() -> None:
        assert PROGRAM is not None
        async with browser(PROGRAM) as page:
            await page.size(1900, 1000)
            await page.open(page_url)
            shown = "document.body.innerText"
            await page.until(
                f"{shown}.includes('Comparing 4 Runs') && {shown}.includes('optim.lr')", WAIT_SECONDS
            )
            told = await page.evaluate(shown)
            for value in ("0.0001", "0.0003", "0.001", "0.003"):
                assert value in told
            await asyncio.sleep(2)  # its plot is drawn after its tables
            await picture(page, "mlflow_compare", tmp_path)

    asyncio.run(look())
