from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prl.tracking.mlflow_run import Facts, TrackedRun
from prl.tracking.mlflow_store import Store
from prl.tracking.mlflow_sweep import PARENT_FILE, join_sweep, settle_sweep
from prl.tracking.names import MetricNames

Make = Callable[..., Facts]


@pytest.fixture
def client(store: Store) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store.uri)


@pytest.fixture
def connect(store: Store) -> Callable[[Facts], TrackedRun]:
    def make(facts: Facts) -> TrackedRun:
        tracked = TrackedRun(facts, store, MetricNames(), print)
        tracked.connect()
        return tracked

    return make


def test_elements_are_children_of_one_parent(
    tmp_path: Path, facts: Make, connect: Callable, client: Any
) -> None:
    sweep = tmp_path / "multirun" / "2026-01-01"
    elements = [connect(facts(name=name, sweep=sweep)) for name in "012"]
    (parent,) = {element.parent_id for element in elements}
    assert (sweep / PARENT_FILE).read_text() == f"{parent}\n"
    run = client.get_run(parent)
    assert run.info.run_name == "2026-01-01" and run.info.status == "RUNNING"
    assert len({element.run_id for element in elements} | {parent}) == 4
    for element in elements:
        assert client.get_run(element.run_id).data.tags["mlflow.parentRunId"] == parent


def test_the_parent_has_the_status_that_its_children_amount_to(
    tmp_path: Path, facts: Make, connect: Callable, client: Any
) -> None:
    sweep = tmp_path / "sweep"
    first, second = (connect(facts(name=name, sweep=sweep)) for name in "01")

    def parent_status() -> str:
        return client.get_run(first.parent_id).info.status

    first.finish("FINISHED")
    assert parent_status() == "RUNNING", "the second still runs"
    second.finish("FAILED")
    assert parent_status() == "FAILED"
    again = connect(facts(attempt=2, name="1", sweep=sweep))
    assert again.parent_id == first.parent_id
    again.finish("FINISHED")
    assert parent_status() == "FINISHED"


def test_a_later_element_opens_the_parent_again(
    tmp_path: Path, facts: Make, connect: Callable, client: Any
) -> None:
    sweep = tmp_path / "sweep"
    first = connect(facts(name="0", sweep=sweep))
    first.finish("KILLED")
    assert client.get_run(first.parent_id).info.status == "KILLED"
    connect(facts(name="1", sweep=sweep))
    assert client.get_run(first.parent_id).info.status == "RUNNING"


def test_a_single_run_has_no_parent(facts: Make, connect: Callable, client: Any) -> None:
    tracked = connect(facts())
    tracked.finish("FINISHED")
    assert tracked.parent_id is None
    assert "mlflow.parentRunId" not in client.get_run(tracked.run_id).data.tags


def test_a_parent_without_children_is_finished(tmp_path: Path, client: Any) -> None:
    experiment = client.create_experiment("e")
    parent = join_sweep(client, experiment, tmp_path / "s")
    assert join_sweep(client, experiment, tmp_path / "s") == parent
    assert settle_sweep(client, parent) == "FINISHED"
