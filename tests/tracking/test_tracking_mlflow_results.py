"""What a run leaves in a real store beside its metrics: traces, plots, tables, code, registered weights."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tracking_lab import append_episodes, append_line, episode, make_facts

from prl.config.serving import MlflowConfig
from prl.tracking.facts import Facts
from prl.tracking.mlflow_models import exports, note_export, register
from prl.tracking.mlflow_run import run_id_file
from prl.tracking.mlflow_store import Store, find_store
from prl.tracking.mlflow_writer import TRACE_FAILURES, MlflowWriter

Make = Callable[..., Facts]
SECONDS = 500


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, first_use: Any) -> Store:
    """One store for all runs of this file: opening a sqlite store takes MLflow a second."""
    outputs = tmp_path_factory.mktemp("results") / "outputs"
    outputs.mkdir()
    shutil.copy(first_use.store.database, outputs / "mlflow.db")
    return find_store(None, outputs)


@pytest.fixture
def facts(store: Store, request: pytest.FixtureRequest) -> Make:
    """What the tracker is told about a run of the test's own."""
    assert store.database is not None
    return functools.partial(make_facts, store.database.parent / request.node.name)


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def client(store: Store) -> Iterator[Any]:
    import mlflow
    from mlflow.tracking import MlflowClient

    mlflow.set_tracking_uri(store.uri)
    yield MlflowClient(store.uri)
    mlflow.set_tracking_uri(None)  # type: ignore[arg-type]


@pytest.fixture
def write(store: Store, said: list[str]) -> Callable[..., MlflowWriter]:
    """Writes everything of a run and closes it."""

    def run(
        facts: Facts, status: str = "FINISHED", prepare: Callable[[MlflowWriter], None] | None = None
    ) -> Any:
        writer = MlflowWriter(facts, store, said.append, interval=0.1)
        if prepare:
            prepare(writer)
        writer.start()
        assert writer.close(status, SECONDS), said
        return writer

    return run


def fill(facts: Facts, steps: int = 3) -> None:
    reward = "train/agg/effective/agent/reward/mean"
    for step in range(1, steps + 1):
        append_line(facts.run, step, "orchestrator", **{reward: step / 10, "time/wait_for_policy": 0.1})
        values = {"optim/lr": 1e-4, "entropy/all/mean": 1.0, "mismatch_kl/all/mean": 1e-3 * step}
        append_line(facts.run, step, "trainer", **values, **{"time/wait_for_batch": 1.0})
        append_episodes(facts.run.traces, episode(f"a{step}", step), episode(f"b{step}", step))


def paths(client: Any, run_id: str, below: str | None = None) -> set[str]:
    found: set[str] = set()
    for entry in client.list_artifacts(run_id, below):
        found |= paths(client, run_id, entry.path) if entry.is_dir else {entry.path}
    return found


def traces_of(client: Any, run_id: str) -> list[Any]:
    experiment = client.get_run(run_id).info.experiment_id
    return client.search_traces(locations=[experiment], run_id=run_id)


def run_id(facts: Facts) -> str:
    return run_id_file(facts.run).read_text().strip()


def test_a_finished_run_leaves_plots_tables_code_and_traces(
    facts: Make, write: Callable[..., Any], client: Any, store: Store, said: list[str]
) -> None:
    told = facts()
    fill(told)
    (told.run.path / "slurm").mkdir()
    (told.run.path / "slurm" / "run.sbatch").write_text("#SBATCH -N 1\n")
    write(told)
    mine = run_id(told)
    kept = paths(client, mine)
    expected = {f"plots/{name}.svg" for name in ("reward", "mismatch_kl", "entropy", "waits")}
    expected |= {f"config/attempt_1/{name}" for name in ("resolved.yaml", "environment.txt", "run.sbatch")}
    assert expected | {"traces/attempt_1.json"} <= kept and said == []
    assert (told.run.path / "plots" / "reward.svg").exists(), "the plots are in the run directory too"
    table = store.artifacts / "prl" / mine / "artifacts/traces/attempt_1.json"
    rows = json.loads(table.read_text())
    assert (
        len(rows["data"]) == 3 and dict(zip(rows["columns"], rows["data"][0], strict=True))["reward"] == 0.5
    )


def test_episodes_become_traces_with_turns_tools_rewards_and_versions(
    facts: Make, write: Callable[..., Any], client: Any
) -> None:
    told = facts()
    fill(told)
    write(told)
    found = {trace.info.tags["step"]: trace for trace in traces_of(client, run_id(told))}
    assert set(found) == {"1", "2", "3"}, "one of each step, linked to the run"
    second = found["2"]
    assert second.info.tags["policy_version"] == "1" and second.info.tags["env"] == "toy"
    assert second.info.execution_duration == 2000, "milliseconds of the episode"
    kinds = [(span.span_type, span.name) for span in second.data.spans]
    assert kinds.count(("CHAT_MODEL", "reply")) == 2 and kinds.count(("TOOL", "tool")) == 1
    (tool,) = [span for span in second.data.spans if span.span_type == "TOOL"]
    assert tool.outputs["content"] == "42" and tool.inputs["messages"][-1]["content"] == "call the tool"
    ((name, value),) = [(told.name, told.value) for told in second.info.assessments]
    assert (name, value) == ("reward", 0.5)


def test_a_failed_episode_is_seen_as_such(facts: Make, write: Callable[..., Any], client: Any) -> None:
    told = facts()
    append_line(told.run, 1, loss=1.0)
    error = {"type": "RolloutTimeout", "message": "300 s"}
    append_episodes(told.run.traces, episode("a", 1, reward=None, error=error))
    write(told)
    (trace,) = traces_of(client, run_id(told))
    assert trace.info.state.value == "ERROR" and trace.info.assessments == []


def test_a_resume_sends_no_episode_twice(facts: Make, write: Callable[..., Any], client: Any) -> None:
    first = facts()
    fill(first, steps=2)
    write(first, "KILLED")
    append_episodes(first.run.traces, episode("late", 3))
    write(facts(attempt=2))
    steps = sorted(trace.info.tags["step"] for trace in traces_of(client, run_id(first)))
    assert steps == ["1", "2", "3"]
    assert {"traces/attempt_1.json", "traces/attempt_2.json"} <= paths(client, run_id(first))


def test_no_traces_where_none_are_wanted(facts: Make, write: Callable[..., Any], client: Any) -> None:
    told = facts(tracking=MlflowConfig(traces_per_step=0))
    fill(told)
    write(told)
    assert traces_of(client, run_id(told)) == [] and "traces/attempt_1.json" not in paths(
        client, run_id(told)
    )


def test_a_tracker_without_traces_keeps_everything_else(
    facts: Make, write: Callable[..., Any], client: Any, said: list[str]
) -> None:
    told = facts()
    fill(told)

    def refuse(writer: MlflowWriter) -> None:
        def log_traces(records: list[Any]) -> None:
            raise RuntimeError("no such endpoint")

        writer._tracked.log_traces = log_traces  # type: ignore[method-assign]
        writer._trace_failures = TRACE_FAILURES - 1

    write(told, prepare=refuse)
    assert client.get_run(run_id(told)).info.status == "FINISHED"
    assert len(client.get_metric_history(run_id(told), "entropy/all/mean")) == 3
    assert len(said) == 1 and "no such endpoint" in said[0] and "takes no traces" in said[0]


def test_plots_that_fail_do_not_cost_the_status(
    facts: Make, write: Callable[..., Any], client: Any, said: list[str]
) -> None:
    told = facts()
    fill(told)
    (told.run.path / "plots").write_text("a file is in the way")
    write(told)
    assert client.get_run(run_id(told)).info.status == "FINISHED"
    assert len(said) == 1 and "lacks the plots" in said[0]


def test_an_impatient_user_gets_the_status_without_the_plots(
    facts: Make, store: Store, client: Any, said: list[str]
) -> None:
    told, wait = facts(), threading.Event()
    append_line(told.run, 1, loss=1.0)
    writer = MlflowWriter(told, store, said.append, interval=0.1)
    writer._tracked.add_results = wait.wait  # type: ignore[method-assign,assignment]
    writer.start()
    assert writer.close("KILLED", SECONDS, impatient=lambda: writer._settled) is True
    assert client.get_run(run_id(told)).info.status == "KILLED"
    assert len(said) == 1 and "lacks some of the plots" in said[0]
    wait.set()


def test_a_thousand_metrics_a_step_arrive(facts: Make, write: Callable[..., Any], client: Any) -> None:
    told = facts()
    for step in (1, 2, 3):
        append_line(told.run, step, **{f"group_{n % 7}/metric_{n}": n + step for n in range(1001)})
    write(told)
    run = client.get_run(run_id(told))
    assert len(run.data.metrics) == 1001 and run.data.metrics["group_6/metric_1000"] == 1003
    assert [p.value for p in client.get_metric_history(run_id(told), "group_0/metric_0")] == [1, 2, 3]


BAD_NAMES = ("avg@4", "pass^2", "a(b)", "a[0]", "a=b", "80%", "a//b", "./a", "/a", "a/../b", "..a", "x" * 300)


def test_every_bad_name_arrives_and_none_costs_the_batch(
    facts: Make, write: Callable[..., Any], client: Any, said: list[str]
) -> None:
    told = facts()
    append_line(told.run, 1, **{name: float(n) for n, name in enumerate(BAD_NAMES)}, good=7.0)
    append_line(told.run, 1, **{"a/b": 50.0, "a/b/c": 51.0})
    write(told)
    metrics = client.get_run(run_id(told)).data.metrics
    assert len(metrics) == len(BAD_NAMES) + 3 and said == []
    assert metrics["good"] == 7 and metrics["avg_at_4"] == 0 and metrics["a/b/c"] == 51
    assert sorted(metrics.values()) == sorted([*map(float, range(len(BAD_NAMES))), 7.0, 50.0, 51.0])


def weights(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"x")
    return path


def test_weights_are_named_and_registered_on_request(
    facts: Make, write: Callable[..., Any], client: Any, said: list[str]
) -> None:
    told = facts(tracking=MlflowConfig(register_model="mine"))
    fill(told)
    place = weights(told.run.path / "weights")
    write(told)
    assert client.get_run(run_id(told)).data.tags["export"] == str(place)
    (version,) = client.search_model_versions("name = 'mine'")
    assert version.source == place.as_uri() and version.run_id == run_id(told)
    assert said == ["MLflow has the weights as version 1 of mine"]
    assert register(client, "mine", place, run_id(told)) == 1, "the same weights are one version"
    other = weights(told.run.path / "checkpoints" / "step_3" / "weights")
    assert register(client, "mine", other, run_id(told)) == 2


def test_a_run_that_failed_registers_nothing(facts: Make, write: Callable[..., Any], client: Any) -> None:
    told = facts(tracking=MlflowConfig(register_model="failed"))
    append_line(told.run, 1, loss=1.0)
    weights(told.run.path / "weights")
    write(told, "FAILED")
    assert "failed" not in {model.name for model in client.search_registered_models()}


def test_without_weights_the_user_is_told(facts: Make, write: Callable[..., Any], said: list[str]) -> None:
    told = facts(tracking=MlflowConfig(register_model="mine"))
    append_line(told.run, 1, loss=1.0)
    write(told)
    assert len(said) == 1 and "lacks the plots or the weights" in said[0]


def test_exports_are_found_by_their_step(facts: Make) -> None:
    run = facts().run
    assert exports(run) == {}
    weights(run.path / "checkpoints" / "step_20" / "weights")
    (run.checkpoints / "step_10" / "weights").mkdir(parents=True)
    assert exports(run) == {"export.step_20": run.checkpoints / "step_20" / "weights"}


def test_an_export_is_noted_in_the_run_it_came_from(
    facts: Make, write: Callable[..., Any], client: Any, store: Store
) -> None:
    from prl.config.load import dump_resolved

    told = facts()
    append_line(told.run, 1, loss=1.0)
    place = weights(told.run.path / "checkpoints" / "step_1" / "weights")
    assert note_export(told.run.path, place, None) is None, "no config, no MLflow run: nothing to tell"
    with pytest.raises(ValueError, match=r"register=noted: .* has no MLflow run"):
        note_export(told.run.path, place, "noted")
    write(told)
    told.run.resolved_config.parent.mkdir(parents=True)
    told.run.resolved_config.write_text(dump_resolved("rl", told.config))
    assert note_export(told.run.path, place, "noted") == "version 1 of noted in MLflow"
    assert client.get_run(run_id(told)).data.tags["export.step_1"] == str(place)


def test_code_that_was_changed_is_kept(
    tmp_path: Path, facts: Make, write: Callable[..., Any], client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "code"
    where.mkdir()
    monkeypatch.chdir(where)
    for words in ("init -q", "add -A", "-c user.name=a -c user.email=a@b commit -q --allow-empty -m x"):
        subprocess.run(["git", *words.split()], check=True)
    (where / "new.py").write_text("1")
    told = facts()
    append_line(told.run, 1, loss=1.0)
    write(told)
    assert "config/attempt_1/git.diff" in paths(client, run_id(told))
    assert len(client.get_run(run_id(told)).data.tags["git_commit"]) == 40
