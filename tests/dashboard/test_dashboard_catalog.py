from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_runs import Shape, write_configs, write_run

from prl.dashboard.catalog import Catalog, Run, UnknownRun, find_runs
from prl.dashboard.summary import Summaries


def make(path: Path) -> Path:
    write_configs(path, Shape())
    return path


def the_run(path: Path) -> Run:
    return next(iter(find_runs(path)))


def test_runs_are_found_below_the_root_at_any_of_a_few_depths(tmp_path: Path) -> None:
    for name in ("a", "sweep/0", "multirun/2026/10-00-00/3"):
        make(tmp_path / name)
    make(tmp_path / "1/2/3/4/5/too_deep")
    make(tmp_path / ".hidden")
    make(tmp_path / "a" / "checkpoints" / "inner")
    assert {run.name for run in find_runs(tmp_path)} == {"a", "0", "3"}


def test_a_root_may_be_a_run_itself(tmp_path: Path) -> None:
    run = the_run(make(tmp_path / "alone"))
    assert (run.name, run.group) == ("alone", "")


def test_the_group_is_what_lies_between_root_and_run(tmp_path: Path) -> None:
    make(tmp_path / "multirun" / "lr" / "0")
    assert the_run(tmp_path).group == "multirun/lr"


def test_an_id_belongs_to_the_path_and_says_nothing_of_it(tmp_path: Path) -> None:
    make(tmp_path / "a"), make(tmp_path / "b")
    ids = {run.name: run.id for run in find_runs(tmp_path)}
    assert ids["a"] != ids["b"]
    assert {run.name: run.id for run in find_runs(tmp_path)} == ids
    assert all(len(run_id) == 12 and run_id.isalnum() for run_id in ids.values())


def test_linked_directories_are_no_runs(tmp_path: Path) -> None:
    outside = make(tmp_path / "outside" / "secret")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "linked").symlink_to(outside)
    assert list(find_runs(tmp_path / "served")) == []


def test_a_file_that_a_link_leads_out_of_the_root_is_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("hush")
    path = make(tmp_path / "served" / "run")
    (path / "STATUS.md").symlink_to(secret)
    (path / "own.md").write_text("mine")
    (path / "loop.md").symlink_to(path / "loop.md")
    run = the_run(tmp_path / "served")
    assert run.inside(path / "STATUS.md") is None
    assert run.inside(path / ".." / ".." / "secret.txt") is None
    assert run.inside(path / "loop.md") is None
    assert run.inside(path / "own.md") == (path / "own.md").resolve()
    assert run.files("*.md") == [(path / "own.md").resolve()]


def test_an_unknown_id_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "a")
    catalog = Catalog(lambda: [tmp_path])
    known = catalog.runs()[0]
    assert catalog.get(known.id) == known
    for bad in ("", "nothing", str(known.path), "../a"):
        with pytest.raises(UnknownRun):
            catalog.get(bad)


def test_attempts_are_numbers_in_order(tmp_path: Path) -> None:
    for attempt in (2, 10, 1):
        write_configs(tmp_path / "a", Shape(), attempt)
    (tmp_path / "a" / "configs" / "attempt_x").mkdir()
    assert the_run(tmp_path).attempts() == [1, 2, 10]


def test_a_row_says_what_a_run_is_and_how_far(tmp_path: Path) -> None:
    write_run(tmp_path / "a", Shape(episodes=64, lr=1e-3, loss="icepop", seed=5))
    row = Summaries().row(the_run(tmp_path))
    told = {
        key: row[key] for key in ("name", "algo", "loss", "model", "env", "lr", "seed", "step", "max_steps")
    }
    assert told == {
        "name": "a",
        "algo": "grpo",
        "loss": "icepop",
        "model": "tiny",
        "env": "reverse_text,arithmetic",
        "lr": 1e-3,
        "seed": 5,
        "step": 2,
        "max_steps": 2,
    }
    assert 0 < row["reward"] < 1.1


def test_states_come_from_status_and_from_signs_of_life(tmp_path: Path) -> None:
    write_run(tmp_path / "finished", Shape(episodes=32))
    write_run(tmp_path / "killed", Shape(episodes=32, ended="KILLED"))
    write_run(tmp_path / "running", Shape(episodes=32, ended=None))
    silent = write_run(tmp_path / "silent", Shape(episodes=32, ended=None))
    (silent / "STATUS.md").unlink()  # its newest metric is old
    rows = {run.name: Summaries().row(run)["state"] for run in find_runs(tmp_path)}
    assert rows == {name: name for name in rows}


def test_the_end_of_an_earlier_attempt_is_not_the_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "again", Shape(episodes=32, ended="FAILED"))
    write_configs(path, Shape(), attempt=2)
    with (path / "STATUS.md").open("a") as file:
        file.write("\n## 2026-11-30 12:00:00 UTC: attempt 2 started\n")
    assert Summaries().row(the_run(tmp_path))["state"] == "running"


def test_a_broken_config_costs_its_own_columns_only(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", Shape(episodes=32))
    (path / "configs" / "attempt_1" / "resolved.yaml").write_text("a: [1")
    row = Summaries().row(the_run(tmp_path))
    assert row["step"] == 1 and row["env"] is None


def test_a_config_hides_secrets_and_builds_no_objects(tmp_path: Path) -> None:
    path = make(tmp_path / "a")
    config = Summaries().config(the_run(tmp_path), 1)
    assert config["client"]["headers"] == {"Authorization": "***"}
    marker = tmp_path / "made"
    (path / "configs" / "attempt_1" / "resolved.yaml").write_text(
        f"x: !!python/object/apply:os.mkdir ['{marker}']\n"
    )
    assert Summaries().config(the_run(tmp_path), 1) == {}
    assert not marker.exists()
