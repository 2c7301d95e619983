"""Completion marker, retention, abandoned timelines and what `run.resume` resolves to; no torch needed."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from prl.checkpoint.marker import is_complete, mark_complete, read_step, step_dir, why_incomplete
from prl.checkpoint.resolve import at_step, checkpoints_dir, latest, resolve_resume
from prl.checkpoint.retention import complete_steps, prune, set_aside
from prl.config.training import CkptConfig
from prl.run_dir import RunDir


def write_parts(checkpoints, step, parts=("trainer", "orchestrator")):
    directory = step_dir(checkpoints, step)
    for part in parts:
        (directory / part / "deep").mkdir(parents=True, exist_ok=True)
        (directory / part / "state.json").write_text(f"{part} of {step}")
        (directory / part / "deep" / ".metadata").write_bytes(b"12345")
    return directory


def finish(checkpoints, *steps):
    for step in steps:
        mark_complete(write_parts(checkpoints, step))


def test_a_step_is_complete_when_marked(tmp_path):
    directory = write_parts(tmp_path, 7)
    assert why_incomplete(directory) == "no file COMPLETE: the save did not finish"
    mark_complete(directory)
    assert is_complete(directory) and read_step(directory) == 7
    marker = json.loads((directory / "COMPLETE").read_text())
    assert marker["parts"] == ["trainer", "orchestrator"]
    assert marker["files"]["trainer/deep/.metadata"] == 5
    assert len(marker["files"]) == 4


@pytest.mark.parametrize("missing", ["trainer", "orchestrator"])
def test_a_step_without_a_part_is_not_marked(tmp_path, missing):
    there = [part for part in ("trainer", "orchestrator") if part != missing]
    directory = write_parts(tmp_path, 7, there)
    (directory / missing).mkdir()
    with pytest.raises(ValueError, match=f"its part '{missing}' is not there"):
        mark_complete(directory)
    assert not is_complete(directory)
    mark_complete(directory, there)
    assert is_complete(directory)


def test_only_step_directories_are_marked(tmp_path):
    (tmp_path / "final" / "trainer").mkdir(parents=True)
    with pytest.raises(ValueError, match="step_<number>"):
        mark_complete(tmp_path / "final", ["trainer"])


def cut(directory):
    (directory / "trainer" / "state.json").write_text("t")


def remove(directory):
    (directory / "orchestrator" / "state.json").unlink()


def empty_marker(directory):
    (directory / "COMPLETE").write_text("")


def odd_marker(directory):
    (directory / "COMPLETE").write_text("[1]")


DAMAGES = {
    cut: "trainer/state.json has 1 bytes instead of 13",
    remove: "orchestrator/state.json is missing",
    empty_marker: "damaged file COMPLETE",
    odd_marker: "damaged file COMPLETE",
}


@pytest.mark.parametrize(
    ("damage", "reason"), DAMAGES.items(), ids=lambda value: getattr(value, "__name__", "")
)
def test_a_damaged_step_is_not_chosen(tmp_path, damage, reason):
    finish(tmp_path, 5, 10)
    damage(tmp_path / "step_10")
    assert why_incomplete(tmp_path / "step_10") == reason
    assert complete_steps(tmp_path) == [5]
    assert latest(tmp_path) == tmp_path / "step_5"
    with pytest.raises(ValueError, match=re.escape(reason)):
        resolve_resume("10", tmp_path)


def test_a_file_more_does_no_harm(tmp_path):
    finish(tmp_path, 5)
    (tmp_path / "step_5" / "weights").mkdir()
    (tmp_path / "step_5" / "weights" / "model.safetensors").write_text("exported later")
    assert is_complete(tmp_path / "step_5")


def test_complete_steps_ignores_everything_else(tmp_path):
    finish(tmp_path, 100, 20, 3)
    write_parts(tmp_path, 200)
    (tmp_path / "step_x").mkdir()
    (tmp_path / ".step_7.tmp").mkdir()
    (tmp_path / "step_9").write_text("a file")
    assert complete_steps(tmp_path) == [3, 20, 100]
    assert complete_steps(tmp_path / "absent") == []


@pytest.mark.parametrize(
    ("keep_last", "keep_interval", "kept"),
    [
        (None, None, [2, 4, 6, 8, 10]),
        (1, None, [10]),
        (2, None, [8, 10]),
        (9, None, [2, 4, 6, 8, 10]),
        (None, 4, [4, 8, 10]),
        (1, 3, [6, 10]),
        (2, 4, [4, 8, 10]),
        (None, 7, [10]),
    ],
)
def test_prune_keeps_the_union(tmp_path, keep_last, keep_interval, kept):
    finish(tmp_path, 2, 4, 6, 8, 10)
    removed = prune(tmp_path, 10, keep_last, keep_interval)
    assert complete_steps(tmp_path) == kept
    assert removed == [step for step in (2, 4, 6, 8, 10) if step not in kept]
    assert not any(step_dir(tmp_path, step).exists() for step in removed)


def test_prune_waits_for_the_new_step(tmp_path):
    finish(tmp_path, 2, 4)
    write_parts(tmp_path, 6)
    with pytest.raises(ValueError, match="only after step 6 is complete"):
        prune(tmp_path, 6, 1, None)
    assert complete_steps(tmp_path) == [2, 4]


def test_prune_removes_debris_and_leaves_later_and_damaged_steps(tmp_path):
    finish(tmp_path, 2, 4, 8, 9)
    write_parts(tmp_path, 3)
    write_parts(tmp_path, 11)
    cut(tmp_path / "step_2")
    assert prune(tmp_path, 8, None, None) == [3]
    assert prune(tmp_path, 8, 1, None) == [4]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_11", "step_2", "step_8", "step_9"]


def test_a_resumed_run_sets_later_steps_aside(tmp_path):
    finish(tmp_path, 5, 10, 15)
    write_parts(tmp_path, 17, ["orchestrator"])
    assert set_aside(tmp_path, after=5) == [10, 15, 17]
    assert complete_steps(tmp_path) == [5]
    assert latest(tmp_path) == tmp_path / "step_5"
    assert complete_steps(tmp_path / "abandoned") == [10, 15]
    assert not (tmp_path / "step_17").exists()
    assert set_aside(tmp_path, after=5) == []

    finish(tmp_path, 10)
    (tmp_path / "step_10" / "mark").write_text("second timeline")
    set_aside(tmp_path, after=7)
    assert (tmp_path / "abandoned" / "step_10" / "mark").exists()


def test_resolve_resume(tmp_path):
    finish(tmp_path / "a", 5, 10)
    write_parts(tmp_path / "a", 15)
    finish(tmp_path / "b", 3)
    here = tmp_path / "a"
    assert resolve_resume(None, here) is None
    assert resolve_resume("latest", here) == here / "step_10"
    assert resolve_resume("5", here) == here / "step_5"
    assert resolve_resume(str(tmp_path / "b" / "step_3"), here) == tmp_path / "b" / "step_3"
    assert at_step(here, 10) == here / "step_10"


def test_a_resume_of_nothing_says_what_to_do(tmp_path):
    remedy = r"run.resume = latest: .*holds no checkpoint at all. Leave run.resume out .*run.clean=true"
    with pytest.raises(ValueError, match=remedy):
        resolve_resume("latest", tmp_path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("7", r"no complete checkpoint of step 7 .* holds complete steps: 5, 10; not complete: 15"),
        ("15", r"step 15 \(no file COMPLETE: the save did not finish\)"),
        ("latets", r"run.resume=latets: there is no directory .*latets; .* complete steps: 5, 10"),
        ("{root}/a/step_15", r"not a complete checkpoint .* complete steps: 5, 10; not complete: 15"),
        ("{root}/a", r"not a complete checkpoint .*a holds complete steps: 5, 10"),
        ("{root}/run", r"not a complete checkpoint .*run/checkpoints holds complete steps: 8"),
        ("{root}/nowhere", r"nowhere; .*complete steps: 5, 10"),
    ],
)
def test_a_mistyped_resume_lists_what_is_there(tmp_path, value, message):
    finish(tmp_path / "a", 5, 10)
    write_parts(tmp_path / "a", 15)
    finish(tmp_path / "run" / "checkpoints", 8)
    with pytest.raises(ValueError, match=message):
        resolve_resume(value.format(root=tmp_path), tmp_path / "a")


@pytest.mark.parametrize("value", ["latest", "5", "step_5"])
def test_nothing_to_resume_from_is_an_error(tmp_path, value):
    with pytest.raises(ValueError, match="no checkpoint at all"):
        resolve_resume(value, tmp_path / "checkpoints")
    write_parts(tmp_path / "checkpoints", 4)
    with pytest.raises(ValueError, match="complete steps: none; not complete: 4"):
        resolve_resume(value, tmp_path / "checkpoints")


def test_checkpoints_dir(tmp_path):
    run = RunDir(tmp_path)
    assert checkpoints_dir(CkptConfig(), run) == tmp_path / "checkpoints"
    assert checkpoints_dir(CkptConfig(dir="/big/disk"), run).as_posix() == "/big/disk"


def test_the_launchers_part_imports_no_torch():
    code = "import prl.checkpoint.resolve, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
