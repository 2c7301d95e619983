from __future__ import annotations

import functools
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import yaml

from prl.config.algo import EndpointConfig, OpdConfig
from prl.config.schema import RunConfig
from prl.config.training import AdamWConfig
from prl.tracking.mlflow_run import Facts, run_id_file
from prl.tracking.mlflow_store import Store, find_store, locked
from prl.tracking.mlflow_writer import MlflowWriter
from prl.tracking.reader import append_attempt_marker

Log = Callable[..., None]
Make = Callable[..., Facts]


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def start(store: Store, said: list[str]) -> Iterator[Callable[..., MlflowWriter]]:
    writers: list[MlflowWriter] = []

    def make(facts: Facts, where: Store = store) -> MlflowWriter:
        writer = MlflowWriter(facts, where, said.append, interval=0.1)
        writer.start()
        writers.append(writer)
        return writer

    yield make
    for writer in writers:
        writer.close("FAILED", 0)


@pytest.fixture
def client(store: Store) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(store.uri)


def wait_until(condition: Callable[[], bool], timeout: float = 300) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def run_id(facts: Facts) -> str:
    return run_id_file(facts.run).read_text().strip()


def points(client: Any, facts: Facts, name: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in client.get_metric_history(run_id(facts), name)]


def test_a_run_with_its_metrics_params_tags_and_config(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, store: Store, said: list[str]
) -> None:
    told = facts(run=RunConfig(tags={"team": "a", "bad[key]": "b"}))
    writer = start(told)
    for step in (1, 2):
        log_step(
            told.run,
            step,
            "orchestrator",
            **{"train/agg/effective/agent/reward/mean": step / 10, "time/step": 1.0},
        )
        log_step(told.run, step, "trainer", **{"eval/x/avg@4": 0.5, "time/step": 2.0})
    log_step(told.run, None, "orchestrator", **{"dispatcher/inflight/train": 7.0})
    assert writer.close("FINISHED", 300) and said == []
    run = client.get_run(run_id(told))
    assert run.info.status == "FINISHED" and run.info.run_name == "r"
    assert client.get_experiment(run.info.experiment_id).name == "prl"
    assert points(client, told, "train/agg/effective/agent/reward/mean") == [(1, 0.1), (2, 0.2)]
    assert points(client, told, "orchestrator/time/step") == [(1, 1.0), (2, 1.0)]
    assert points(client, told, "trainer/time/step") == [(1, 2.0), (2, 2.0)]
    assert points(client, told, "eval/x/avg_at_4") == [(1, 0.5), (2, 0.5)]
    assert points(client, told, "dispatcher/inflight/train") == [(2, 7.0)], "drawn at the newest step"
    assert run.data.params["optim.lr"] == "0.0001" and run.data.params["env.reverse_text.ratio"] == "1.0"
    tags = run.data.tags
    expected = {"algo": "grpo", "loss": "ipo", "model": "tiny", "env": "reverse_text", "cluster": "local"}
    expected |= {"attempt": "1", "overrides": "optim.lr=1e-4", "team": "a", "bad_key_": "b", "command": "rl"}
    assert expected.items() <= tags.items() and tags["run_dir"] == str(told.run.path)
    assert run.info.artifact_uri.startswith(store.artifacts.as_uri())
    artifact = store.artifacts / "prl" / run_id(told) / "artifacts/config/attempt_1/resolved.yaml"
    assert yaml.safe_load(artifact.read_text())["optim"]["lr"] == 1e-4


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_the_status_is_true(
    status: str, facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any
) -> None:
    told = facts()
    log_step(told.run, 1, loss=0.5)
    assert start(told).close(status, 300)
    assert client.get_run(run_id(told)).info.status == status


def test_the_status_of_a_run_that_failed_does_not_wait_for_its_metrics(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, said: list[str]
) -> None:
    told = facts()
    log_step(told.run, 1, loss=0.5)
    writer = start(told)
    wait_until(lambda: run_id_file(told.run).exists() and points(client, told, "loss") == [(1, 0.5)])

    def refuse(records: Any) -> None:
        raise OSError("no metrics today")

    writer._tracked.log = refuse  # type: ignore[method-assign]
    log_step(told.run, 2, loss=0.25)
    assert writer.close("FAILED", 300, impatient=lambda: writer._status_told) is False
    assert client.get_run(run_id(told)).info.status == "FAILED"
    wait_until(lambda: len(said) == 2)
    assert any(text.startswith("MLflow lacks the last metrics of this run") for text in said)


def test_a_run_is_seen_as_running_while_it_runs(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any
) -> None:
    told = facts()
    start(told)
    log_step(told.run, 1, loss=0.5)
    wait_until(lambda: run_id_file(told.run).exists() and points(client, told, "loss") == [(1, 0.5)])
    assert client.get_run(run_id(told)).info.status == "RUNNING"
    log_step(told.run, 2, loss=0.25)
    wait_until(lambda: len(points(client, told, "loss")) == 2)


def test_nothing_is_told_before_there_is_something_to_tell(
    facts: Make, start: Callable[..., MlflowWriter]
) -> None:
    told = facts()
    writer = start(told)
    time.sleep(0.5)
    assert not run_id_file(told.run).exists()
    assert writer.close("KILLED", 5) and not run_id_file(told.run).exists(), "stopped before it did anything"


def test_a_run_that_failed_before_its_first_step_is_on_record(
    facts: Make, start: Callable[..., MlflowWriter], client: Any
) -> None:
    told = facts()
    assert start(told).close("FAILED", 300)
    assert client.get_run(run_id(told)).info.status == "FAILED"


def test_resume_continues_the_same_run_and_sends_nothing_twice(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any
) -> None:
    first = facts()
    log_step(first.run, 1, loss=1.0)
    log_step(first.run, 2, loss=2.0)
    assert start(first).close("FAILED", 300)
    log_step(first.run, 3, loss=3.0)  # written by a process that outlived the writer
    append_attempt_marker(first.run.metric_file("trainer"), 2, 1)
    second = facts(attempt=2, optim=AdamWConfig(lr=3e-4))
    log_step(second.run, 2, loss=20.0)
    assert start(second).close("FINISHED", 300)
    assert run_id(second) == run_id(first)
    assert points(client, second, "loss") == [(1, 1.0), (2, 2.0), (2, 20.0)], (
        "step 3 was void before it was sent"
    )
    run = client.get_run(run_id(second))
    assert run.info.status == "FINISHED" and run.data.params["optim.lr"] == "0.0001"
    assert json.loads(run.data.tags["params_changed.attempt_2"]) == {"optim.lr": ["0.0001", "0.0003"]}
    assert run.data.tags["attempt"] == "2" and "step 1" in run.data.tags["resumed.attempt_2"]
    assert {file.path for file in client.list_artifacts(run_id(second), "config")} == {
        "config/attempt_1",
        "config/attempt_2",
    }


def test_resume_after_a_killed_launcher_repairs_the_status_and_sends_what_is_missing(
    facts: Make, log_step: Log, store: Store, client: Any, start: Callable[..., MlflowWriter]
) -> None:
    first = facts()
    log_step(first.run, 1, loss=1.0)
    killed = MlflowWriter(first, store, lambda text: None, interval=3600)
    killed._tracked.connect()  # the launcher is killed before anything is sent
    assert client.get_run(run_id(first)).info.status == "RUNNING"
    second = facts(attempt=2)
    assert start(second).close("KILLED", 300)
    assert client.get_run(run_id(second)).info.status == "KILLED"
    assert points(client, second, "loss") == [(1, 1.0)] and run_id(first) == run_id(second)


@pytest.mark.parametrize("loss_of", ["run", "store"])
def test_a_tracker_that_lost_the_run_gets_all_of_it_anew(
    loss_of: str, facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, store: Store
) -> None:
    first = facts()
    log_step(first.run, 1, loss=1.0)
    assert start(first).close("FAILED", 300)
    old = run_id(first)
    if loss_of == "run":
        client.delete_run(old)
    else:
        with sqlite3.connect(store.database) as database:  # type: ignore[arg-type]
            for table in ("metrics", "latest_metrics", "params", "tags", "runs"):
                database.execute(f"delete from {table}")
    second = facts(attempt=2)
    log_step(second.run, 2, loss=2.0)
    assert start(second).close("FINISHED", 300)
    assert run_id(second) != old and points(client, second, "loss") == [(1, 1.0), (2, 2.0)]


def test_a_metric_that_is_refused_never_costs_the_others(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, said: list[str]
) -> None:
    told = facts()
    for step in (1, 2):
        log_step(told.run, step, **{f"m{n}": float(n) for n in range(20)})
    writer = start(told)
    writer._tracked.names.of = lambda producer, name: "not[allowed]" if name == "m7" else name  # type: ignore[method-assign]
    assert writer.close("FINISHED", 300)
    assert set(client.get_run(run_id(told)).data.metrics) == {f"m{n}" for n in range(20)} - {"m7"}
    assert len(points(client, told, "m19")) == 2
    assert len(said) == 1 and "not[allowed]" in said[0]


def test_a_tracker_in_trouble_is_told_once_and_caught_up_with(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, said: list[str], store: Store
) -> None:
    told = facts()
    log_step(told.run, 1, loss=1.0)
    start(told)
    wait_until(lambda: run_id_file(told.run).exists() and points(client, told, "loss") == [(1, 1.0)])
    database = sqlite3.connect(store.database, isolation_level=None)  # type: ignore[arg-type]
    database.execute("alter table metrics rename to hidden")
    for step in (2, 3):
        log_step(told.run, step, loss=float(step))
    wait_until(lambda: len(said) == 1)
    time.sleep(0.5)
    assert len(said) == 1 and "the run goes on" in said[0] and "no such table" in said[0]
    database.execute("alter table hidden rename to metrics")
    wait_until(lambda: said[1:] == ["MLflow is back and up to date"])
    assert points(client, told, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_store_that_others_hold_is_waited_for(
    facts: Make,
    log_step: Log,
    start: Callable[..., MlflowWriter],
    client: Any,
    said: list[str],
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("prl.tracking.mlflow_run.locked", functools.partial(locked, timeout=0.2))
    told = facts()
    log_step(told.run, 1, loss=1.0)
    with locked(store):
        start(told)
        wait_until(lambda: len(said) == 1)
        assert "other writers held the MLflow store" in said[0]
    wait_until(lambda: len(said) == 2)
    assert points(client, told, "loss") == [(1, 1.0)]


def test_an_unreachable_server_costs_bounded_time_and_two_messages(
    facts: Make,
    log_step: Log,
    start: Callable[..., MlflowWriter],
    said: list[str],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    told = facts()
    log_step(told.run, 1, loss=1.0)
    writer = start(told, find_store("http://127.0.0.1:9", tmp_path))
    wait_until(lambda: len(said) == 1)
    time.sleep(0.5)
    began = time.monotonic()
    assert writer.close("FINISHED", 1.0) is False
    assert time.monotonic() - began < 60
    assert len(said) == 2 and "the run goes on" in said[0] and "follow when the run is resumed" in said[1]


@pytest.mark.parametrize(("status", "arrives"), [("FINISHED", True), ("FAILED", False)])
def test_a_slow_tracker_gets_the_end_of_a_run_that_went_well(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], status: str, arrives: bool
) -> None:
    told, goes_on = facts(), threading.Event()
    log_step(told.run, 1, loss=1.0)
    writer = start(told)
    wait_until(run_id_file(told.run).exists)
    finish = writer._tracked.finish

    def slowly(status: str) -> None:
        assert goes_on.wait(300)
        finish(status)

    writer._tracked.finish = slowly  # type: ignore[method-assign]
    threading.Timer(1.5, goes_on.set).start()
    assert writer.close(status, 0.2) is arrives


def test_an_impatient_user_is_not_kept_waiting(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], store: Store
) -> None:
    told = facts()
    log_step(told.run, 1, loss=1.0)
    writer = start(told)
    wait_until(run_id_file(told.run).exists)
    blocker = sqlite3.connect(store.database, isolation_level=None)  # type: ignore[arg-type]
    blocker.execute("begin exclusive")
    began = time.monotonic()
    assert writer.close("KILLED", 300, impatient=lambda: time.monotonic() - began > 0.3) is False
    assert time.monotonic() - began < 60
    blocker.execute("rollback")


def test_long_values_are_cut_and_kept_whole_as_artifacts_and_secrets_stay_home(
    facts: Make, log_step: Log, start: Callable[..., MlflowWriter], client: Any, store: Store
) -> None:
    teacher = EndpointConfig(
        model="m" * 7000, base_url="http://t/v1", headers={"Authorization": "Bearer abc"}
    )
    told = facts(algo=OpdConfig(teacher=teacher))
    log_step(told.run, 1, loss=1.0)
    assert start(told).close("FINISHED", 300)
    assert client.get_run(run_id(told)).data.params["algo.teacher.model"] == "m" * 6000
    artifacts = store.artifacts / "prl" / run_id(told) / "artifacts"
    assert (artifacts / "params/algo.teacher.model.txt").read_text() == "m" * 7000
    assert store.database is not None
    everything = [*artifacts.rglob("*.*"), store.database]
    assert not any(b"Bearer abc" in path.read_bytes() for path in everything if path.is_file())


def test_the_writer_thread_goes_behind_the_processes_that_train(
    facts: Make, start: Callable[..., MlflowWriter]
) -> None:
    start(facts())
    thread = next(thread for thread in threading.enumerate() if thread.name == "mlflow")
    own = os.getpriority(os.PRIO_PROCESS, 0)
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) > min(own, 18))
    assert os.getpriority(os.PRIO_PROCESS, threading.main_thread().native_id or 0) < os.getpriority(
        os.PRIO_PROCESS, thread.native_id or 0
    ), "niceness is the thread's own"
