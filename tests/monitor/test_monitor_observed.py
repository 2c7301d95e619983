from __future__ import annotations

import json
from pathlib import Path

import pytest
from monitor_lab import CONFIG, append, note, observed, write_run

from prl.monitor.observed import Observer, ending, find_run, newest_attempt, observe
from prl.tracking.reader import append_attempt_marker

ERROR = "train/agg/all/agent/error/"


def test_a_run_as_its_directory_tells_it(tmp_path: Path) -> None:
    run = observed(tmp_path, 12)
    assert (run.step, run.max_steps, run.name) == (12, 100, tmp_path.name)
    assert run.curve("trainer", "time/step")[12] == 2.0 and run.curve("nobody", "x") == {}
    assert run.config["optim"] == CONFIG["optim"] and run.first_heard is not None
    assert run.heard - run.first_heard == pytest.approx(22.0)


def test_an_observer_takes_in_what_is_new(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    observer = Observer(tmp_path)
    assert observer.look().step == 2
    append(tmp_path, "trainer", {"step": 3, "time": 1.0, "optim/lr": 1e-4})
    assert observer.look().step == 3


def test_a_resume_makes_later_steps_void(tmp_path: Path) -> None:
    write_run(tmp_path, 5)
    for name in ("orchestrator", "trainer"):
        append_attempt_marker(tmp_path / "metrics" / f"{name}.jsonl", 2, 3)
    run = observe(tmp_path)
    assert run.step == 3 and max(run.curve("trainer", "time/step")) == 3


def test_a_new_attempt_is_noticed(tmp_path: Path) -> None:
    write_run(tmp_path, 2, status="KILLED")
    observer = Observer(tmp_path)
    assert ending(observer.look().run) == "KILLED"
    (tmp_path / "configs" / "attempt_2").mkdir()
    (tmp_path / "configs" / "attempt_2" / "resolved.yaml").write_text("max_steps: 7\n")
    note(tmp_path, 2, "started")
    run = observer.look()
    assert run.run.attempt == 2 and run.max_steps == run.board.max_steps == 7 and ending(run.run) is None


def test_check_ins_do_not_look_like_an_end(tmp_path: Path) -> None:
    run = observed(tmp_path, 2)
    note(tmp_path, 1, "check-in: Down at step 2/100")
    assert ending(run.run) is None
    note(tmp_path, 1, "ended: FAILED")
    assert ending(run.run) == "FAILED"


def test_errors_are_counted_by_type_over_agents_and_recent_steps(tmp_path: Path) -> None:
    other = ERROR.replace("/agent/", "/judge/")
    values = {f"{ERROR}Timeout": 1.0, f"{other}Timeout": 2.0, f"{ERROR}Zero": 0.0, f"{ERROR}a/b": 1.0}
    run = observed(tmp_path, 20, lambda step: values)
    assert run.errors() == {"Timeout": 60, "a/b": 20}
    assert run.errors(10) == {"Timeout": 30, "a/b": 10}


def test_values_on_the_time_axis_are_the_newest(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    for value in (1.0, 2.0):
        append(tmp_path, "orchestrator", {"step": None, "time": value, "dispatcher/inflight/train": value})
    assert observe(tmp_path).latest["orchestrator"] == {"dispatcher/inflight/train": 2.0}


def test_points_that_nobody_asks_for_are_not_kept(tmp_path: Path) -> None:
    run = observed(tmp_path, 3, lambda step: {f"train/env_{n}/all/reward/mean": 1.0 for n in range(50)})
    assert set(run.curves["orchestrator"]) == {
        "train/agg/all/agent/is_trainable/mean",
        "train/agg/all/agent/solved_none",
        "train/agg/all/agent/solved_all",
        "off_policy/dropped",
        "progress/rollouts",
        "time/step",
        "time/wait_for_policy",
    }


def test_a_run_is_found_by_path_and_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = write_run(tmp_path / "outputs" / "mine", 1)
    monkeypatch.chdir(tmp_path)
    assert find_run("mine") == find_run("outputs/mine") == find_run(str(run)) == run.resolve()
    with pytest.raises(ValueError, match=r"yours: no run directory .* Runs in outputs: mine\."):
        find_run("yours")


def test_a_config_that_cannot_be_read_costs_no_look(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    (tmp_path / "configs" / "attempt_1" / "resolved.yaml").write_text("a: [")
    run = observe(tmp_path)
    assert run.config == {} and run.step == 2 and run.max_steps is None


def test_a_copied_run_tells_the_same(tmp_path: Path) -> None:
    import shutil

    write_run(tmp_path / "a", 4, status="FINISHED")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    one, two = observe(tmp_path / "a"), observe(tmp_path / "b")
    assert json.dumps(one.curves, default=dict) == json.dumps(two.curves, default=dict)
    assert ending(two.run) == "FINISHED" and newest_attempt(tmp_path / "b") == 1
