"""Saving beside the training: from a copy, the marker last, one at a time, and failures are told."""

from __future__ import annotations

import threading

import pytest
from checkpoint_ranks import spawn

from prl.checkpoint import background
from prl.checkpoint.background import BackgroundSaver


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    root = tmp_path_factory.mktemp("async")
    case = {"zero": {"stage": 2}, "root": str(root / "checkpoints")}
    (root / "checkpoints").mkdir()
    return spawn(1, [{"do": "async", **case}], root)[0]


def test_training_goes_on_and_the_marker_comes_last(result):
    assert result["before"] is False, "step 3 was trained while step 2 was not complete"


def test_the_next_save_waits_and_the_old_one_goes_after_it(result):
    assert result["steps"] == ["step_3"]


def test_a_failed_save_is_told_and_never_complete(result):
    assert result["failure"] == "a checkpoint could not be saved: no space left"
    assert result["after"] is False


@pytest.fixture
def saver(monkeypatch):
    monkeypatch.setattr(background.dist, "new_group", lambda backend: f"own {backend} group")
    return BackgroundSaver()


def test_one_save_at_a_time(saver):
    order, gate = [], threading.Event()
    saver.start(lambda group: (gate.wait(30), order.append(group)))
    saver.check()
    gate.set()
    saver.start(lambda group: order.append("second"))
    assert order[0] == "own gloo group"
    saver.wait()
    assert order == ["own gloo group", "second"]
    saver.wait()


def test_an_error_is_raised_once_by_whoever_asks_first(saver):
    def fail(_: object) -> None:
        raise OSError("disk")

    saver.start(fail)
    with pytest.raises(RuntimeError, match="could not be saved: disk"):
        saver.wait()
    saver.check()
    saver.start(fail)
    with pytest.raises(RuntimeError, match="disk"):
        saver.start(lambda _: None)
