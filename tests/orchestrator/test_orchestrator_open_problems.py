"""Problems known from other systems that are designed out elsewhere than in this room; the rest of P1 to P18
have tests of their own name beside what they are about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from prl.checkpoint.marker import mark_complete, step_dir
from prl.checkpoint.retention import complete_steps
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.loss import IpoConfig
from prl.loss.batch import from_micro_batch
from prl.loss.components import compute_loss, count_members
from prl.records import MicroBatch


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        compose_job("rl", overrides)
    return str(caught.value)


def test_p5_no_world_size_of_engines_can_be_set_by_hand() -> None:
    assert "unknown key" in refused("+sync.inference_world_size=1")


def test_p6_masked_tokens_of_any_logprob_leave_loss_and_gradient_finite() -> None:
    """Behaviour logprobs of masked tokens lie 1e4 away from the policy's: exp() of that is infinite."""
    row = MicroBatch(
        [1, 2, 3, 4], [0, 1, 2, 3], [False, False, True, True], [0.0, 0.0, 1.0, -1.0],
        [-1e4, -1e4, -0.5, -0.5], [1.0] * 4, [4], ["a"], ["t"],
    )  # fmt: skip
    micro = from_micro_batch(row, torch.device("cpu"))
    logprobs = torch.tensor([0.0, 0.0, -0.4, -0.6], requires_grad=True)
    counts = count_members(micro)
    loss, _ = compute_loss(micro, logprobs, counts, IpoConfig())
    loss.backward()
    assert torch.isfinite(loss) and logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert logprobs.grad[:2].tolist() == [0.0, 0.0] and logprobs.grad[2:].abs().min() > 0


def test_p7_a_checkpoint_without_its_marker_is_none(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        step_dir(tmp_path, step).mkdir(parents=True)
        for part in ("trainer", "orchestrator"):
            (step_dir(tmp_path, step) / part).mkdir()
            (step_dir(tmp_path, step) / part / "state").write_text("s")
        if step != 6:
            mark_complete(step_dir(tmp_path, step))
    assert complete_steps(tmp_path) == [2, 4]


def test_p12_greedy_training_rollouts_are_refused() -> None:
    assert "must be more than 0" in refused("rollout.sampling.temperature=0")
    assert "nothing to learn from" in refused("env.reverse_text.sampling.temperature=0")


def test_p13_a_teacher_that_scores_at_one_and_a_tempered_learner_are_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    compose_job("rl", ["algo=opd", "rollout.sampling.temperature=0.7"])
    assert "compares with a teacher that scores at temperature 1" in caplog.text


def test_p18_every_way_to_forget_on_resume_is_a_field_that_exists() -> None:
    config = compose_job(
        "rl", ["ckpt.skip_scheduler=true", "ckpt.skip_progress=true", "ckpt.skip_optimizer=true"]
    )
    assert config.ckpt.skip_scheduler and config.ckpt.skip_progress and config.ckpt.skip_optimizer


def test_the_orchestrator_needs_no_torch_for_the_weights_it_passes_on() -> None:
    code = "import sys, prl.sync.versions, prl.orchestrator.watcher; print('torch' in sys.modules)"
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
