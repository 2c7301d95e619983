"""The orchestrator's part of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from orchestrator_fakes import FakeCurriculum, FakeGrpo

from prl.config.training import CkptConfig
from prl.orchestrator.eval_epoch import no_evals
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.state import Totals, load, restore, save, saves_at, snapshot, state_path


class Stateful:
    def __init__(self, value: int = 0) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def mixer(*envs: str) -> TaskMixer:
    return TaskMixer({env: FakeCurriculum(env) for env in envs}, dict.fromkeys(envs, 1.0), 0)


def saved(tmp_path: Path, step: int = 3, evals: Any = None) -> Path:
    tasks = mixer("a")
    tasks.draw()
    path = state_path(tmp_path / f"step_{step}")
    save(path, snapshot(step, Totals(10, 4, 2), tasks, {"a": Stateful(5)}, evals or no_evals()))
    return path


@pytest.mark.parametrize(
    ("ckpt", "steps"),
    [
        ({}, []),
        ({"interval": 2}, [2, 4]),
        ({"at_end": True}, [5]),
        ({"interval": 2, "at_end": True}, [2, 4, 5]),
        ({"interval": 5, "at_end": True}, [5]),
    ],
)
def test_steps_that_are_saved(ckpt: dict[str, Any], steps: list[int]) -> None:
    assert [step for step in range(1, 6) if saves_at(step, CkptConfig(**ckpt), 5)] == steps


def test_without_an_end_there_is_no_last_step() -> None:
    assert not any(saves_at(step, CkptConfig(at_end=True), None) for step in range(1, 100))


def test_it_lies_where_the_checkpoint_expects_it(tmp_path: Path) -> None:
    assert saved(tmp_path) == tmp_path / "step_3" / "orchestrator" / "state.json"
    assert json.loads(saved(tmp_path).read_text())["step"] == 3
    assert [p.name for p in saved(tmp_path).parent.iterdir()] == ["state.json"], "no temporary file stays"


def test_everything_comes_back(tmp_path: Path) -> None:
    state = load(saved(tmp_path), 3)
    tasks, algorithm = mixer("a"), Stateful()
    assert restore(state, tasks, {"a": algorithm}, no_evals()) == Totals(10, 4, 2)
    assert algorithm.value == 5
    assert [tasks.draw().task.key for _ in range(2)] == ["a0", "a1"]


def test_p16_evaluations_in_progress_come_back_unless_progress_is_skipped(tmp_path: Path) -> None:
    state = load(saved(tmp_path, evals=Stateful(7)), 3)
    for skip, expected in ((False, 7), (True, 0)):
        evals = Stateful()
        restore(state, mixer("a"), {"a": Stateful()}, evals, skip_progress=skip)
        assert evals.value == expected


def test_p18_skip_progress_forgets_tasks_and_totals_but_no_baselines(tmp_path: Path) -> None:
    tasks, algorithm = mixer("b"), Stateful()
    state = load(saved(tmp_path), 3)
    state["algorithms"]["b"] = {"value": 8}
    assert restore(state, tasks, {"b": algorithm}, no_evals(), skip_progress=True) == Totals()
    assert algorithm.value == 8 and tasks.draw().task.key == "b0"


def test_other_environments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="skip_progress"):
        restore(load(saved(tmp_path), 3), mixer("a", "b"), {"a": FakeGrpo(), "b": FakeGrpo()}, no_evals())


@pytest.mark.parametrize("keep", [0, 1, 100, -2])
def test_a_torn_file_is_not_used(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path)
    path.write_text(path.read_text()[:keep])
    with pytest.raises(ValueError, match=r"state\.json is damaged"):
        load(path, 3)


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": 1}', "null", "\udcff"])
def test_another_file_is_not_used(tmp_path: Path, content: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match="damaged"):
        load(path, 3)


def test_p7_the_step_must_be_the_one_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="step 3, not format 2, step 4"):
        load(saved(tmp_path), 4)


def test_no_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load(state_path(tmp_path / "step_9"), 9)
