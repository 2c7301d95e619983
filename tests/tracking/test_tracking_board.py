from __future__ import annotations

import pytest

from prl.tracking.board import Board, Row
from prl.tracking.reader import Record


def rollouts(step: int, reward: float = 0.5, **values: float) -> Record:
    return Record("orchestrator", step, 0.0, {"train/agg/effective/agent/reward/mean": reward, **values})


def training(step: int, **values: float) -> Record:
    return Record("trainer", step, 0.0, {"optim/lr": 1e-4, "loss/mean": 0.1, **values})


def test_a_row_gathers_both_producers() -> None:
    board = Board(30)
    orchestrator = {
        "train/agg/all/agent/reward/group_spread/mean": 0.2,
        "train/agg/effective/agent/is_truncated/mean": 0.1,
        "train/agg/all/has_error/mean": 0.05,
        "off_policy/max": 2,
        "time/wait_for_policy": 0.5,
        "time/step": 99.0,
        "train/reverse_text/effective/agent/reward/mean": 0.9,
    }
    trainer = {
        "entropy/all/mean": 1.5,
        "mismatch_kl/all/mean": 1e-3,
        "optim/grad_norm": 0.7,
        "perf/throughput": 1234.0,
        "time/step": 2.0,
        "time/wait_for_batch": 1.0,
    }
    assert board.update([rollouts(3, **orchestrator)]) == []
    (row,) = board.update([training(3, **trainer)])
    assert row == Row(3, 0.5, 0.2, 0.1, 0.05, 2, 0.5, 0.1, 1.5, 1e-3, 0.7, 1234.0, 2.0, 1.0, trained=True)


def test_a_step_is_finished_once_and_by_its_training() -> None:
    board = Board()
    assert [row.step for row in board.update([rollouts(1), rollouts(2), training(1)])] == [1]
    assert board.update([training(1), Record("trainer", 2, 0.0, {"perf/mfu": 0.1})]) == []
    assert [row.step for row in board.update([training(2)])] == [2]
    assert board.trained_step == 2


@pytest.mark.parametrize(
    ("batch", "policy", "text"),
    [(3.0, 1.0, "trainer 3.0s"), (1.0, 3.0, "rollouts 3.0s"), (2.0, None, "trainer 2.0s"), (None, 1.0, None)],
)
def test_who_waits(batch: float | None, policy: float | None, text: str | None) -> None:
    assert Row(1, wait_for_batch=batch, wait_for_policy=policy).waits == text


def test_a_resume_forgets_what_is_done_again() -> None:
    board = Board()
    board.update(
        [rollouts(step, reward=step / 10) for step in (1, 2, 3)] + [training(step) for step in (1, 2, 3)]
    )
    finished = board.update(
        [Record("launcher", None, 0.0, attempt=2, resumed_from=1), rollouts(2, 0.9), training(2)]
    )
    assert [row.step for row in finished] == [2]
    assert board.rewards() == {1: 0.1, 2: 0.9} and board.trained_step == 2


def test_what_has_no_step_is_no_row() -> None:
    board = Board()
    assert board.update([Record("orchestrator", None, 0.0, {"off_policy/max": 3.0})]) == []
    assert board.rows == {} and board.trained_step == 0


def test_what_nobody_watches_is_no_row() -> None:
    board = Board()
    assert board.update([Record("orchestrator", 0, 0.0, {"sync/fingerprint_ok": 1.0})]) == []
    assert board.rows == {}


def test_losses_are_the_curve_of_a_run_without_rewards() -> None:
    board = Board()
    board.update([Record("sft", step, 0.0, {"optim/lr": 1e-3, "loss/mean": 1.0 / step}) for step in (2, 1)])
    assert board.losses() == {1: 1.0, 2: 0.5} and board.rewards() == {}
