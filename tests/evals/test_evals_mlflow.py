"""What the tracker gets: a fixed sample, and no harm when it cannot be reached."""

from __future__ import annotations

from pathlib import Path

from evals_lab import fill, make_config, make_run

from launchers.placement import place
from prl.config.serving import EmbeddedConfig
from prl.evals.mlflow_report import publish, sample_records
from prl.evals.results import collect
from prl.evals.sources import Key
from prl.tracking.mlflow_store import Store


def test_the_sample_is_of_good_rollouts_and_the_same_every_time(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(Key(0, "toy", f"t{i}", 0), None if i % 2 else 1.0) for i in range(20)])
    first = [record["task_key"] for record in sample_records(run, count=4)]
    assert len(set(first)) == 4 and all(int(task[1:]) % 2 == 0 for task in first)
    assert [record["task_key"] for record in sample_records(run, count=4)] == first
    assert len(sample_records(run, count=99)) == 10


def test_a_tracker_out_of_reach_is_told_once(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    fill(run, [(Key(0, "toy", "a", 0), 1.0)])
    results = collect(make_config(), run)
    assert results is not None
    said: list[str] = []
    (run.path / "mlflow_run_id").write_text("nobody\n")
    store = Store("http://127.0.0.1:9", tmp_path)
    assert publish(run, store, results, 60, said.append) is False
    assert len(said) == 1 and "MLflow lacks the table" in said[0]


def test_roles_of_an_evaluation(tmp_path: Path) -> None:
    external = place("eval", make_config(), tmp_path / "resolved.yaml", [])
    own = place("eval", make_config(inference=EmbeddedConfig()), tmp_path / "resolved.yaml", ["0"])
    assert [(role.name, role.kind) for role in external] == [("env/toy", "server"), ("eval", "job")]
    assert [role.name for role in own] == ["inference", "env/toy", "eval"]
    assert own[0].devices == ("0",) and own[1].devices == own[2].devices == ()
