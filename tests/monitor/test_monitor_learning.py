from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from monitor_lab import observed

from prl.config.schema import LogConfig
from prl.log_lines import formatter
from prl.monitor import learning
from prl.monitor.doctor import diagnose

REWARD = "train/agg/effective/agent/reward/mean"
TRUNCATED = "train/agg/effective/agent/is_truncated/mean"
TRAINABLE = "train/agg/all/agent/is_trainable/mean"


def test_a_healthy_run_has_no_finding(tmp_path: Path) -> None:
    run = observed(tmp_path, 40, lambda step: {REWARD: 0.2 + step / 100})
    assert diagnose(run) == []


def test_a_run_without_a_line_has_no_finding(tmp_path: Path) -> None:
    assert diagnose(observed(tmp_path, 0)) == []


@pytest.mark.parametrize(
    ("values", "config", "knob"),
    [
        ({"solved_all": 0.9, "solved_none": 0.0}, {}, "harder tasks"),
        ({"solved_all": 0.0, "solved_none": 0.95}, {}, "easier tasks"),
        ({}, {"rollout": {"group_size": 1}}, "rollout.group_size=8"),
    ],
)
def test_zero_advantages(tmp_path: Path, values: dict[str, float], config: Any, knob: str) -> None:
    own = {f"train/agg/all/agent/{name}": value for name, value in values.items()}
    run = observed(tmp_path, 12, lambda step: {TRAINABLE: 0.05, **own}, config=config)
    found = learning.zero_advantages(run)
    assert (
        found and found.severity == "trouble" and "5% of the newest rollouts carry credit" in found.evidence
    )
    assert knob in found.knob


def test_credit_of_every_agent_counts(tmp_path: Path) -> None:
    other = TRAINABLE.replace("/agent/", "/judge/")
    run = observed(tmp_path, 12, lambda step: {TRAINABLE: 0.05, other: 0.9})
    assert learning.zero_advantages(run) is None


def test_batches_that_were_skipped_show_only_in_the_log(tmp_path: Path) -> None:
    run = observed(tmp_path, 0)
    line = "10:00:00 WARNING prl.orchestrator.loop batch 1: none of 128 rollouts carries credit; skipped\n"
    (tmp_path / "logs" / "attempt_1" / "orchestrator.log").write_text(2 * line)
    assert learning.zero_advantages(run) is None
    (tmp_path / "logs" / "attempt_1" / "orchestrator.log").write_text(5 * line)
    found = learning.zero_advantages(run)
    assert found and "5 batches were skipped" in found.evidence


def test_batches_that_were_skipped_are_counted_in_json_lines_too(tmp_path: Path) -> None:
    run = observed(tmp_path, 0)
    words = "batch %d: none of %d rollouts carries credit; skipped"
    record = logging.LogRecord("prl.orchestrator.loop", logging.WARNING, "", 1, words, (1, 128), None)
    line = formatter(LogConfig(format="json"), "orchestrator").format(record) + "\n"
    (tmp_path / "logs" / "attempt_1" / "orchestrator.log").write_text(4 * line)
    found = learning.zero_advantages(run)
    assert found and "4 batches were skipped" in found.evidence


def test_growing_mismatch(tmp_path: Path) -> None:
    run = observed(tmp_path, 30, training=lambda step: {"mismatch_kl/all/mean": 2e-4 * 1.2**step})
    found = learning.growing_mismatch(run)
    assert (
        found
        and "from 6.2e-04 to 2.4e-02" in found.evidence
        and found.knob == "rollout.max_off_policy_steps=4 (it is 8)"
    )


@pytest.mark.parametrize("kl", [lambda step: 1e-2, lambda step: 1e-6 * 1.3**step])
def test_a_flat_or_tiny_mismatch_is_none(tmp_path: Path, kl: Any) -> None:
    run = observed(tmp_path, 20, training=lambda step: {"mismatch_kl/all/mean": kl(step)})
    assert learning.growing_mismatch(run) is None


def test_a_tight_bound_leaves_the_rate_as_knob(tmp_path: Path) -> None:
    run = observed(
        tmp_path,
        30,
        training=lambda step: {"mismatch_kl/all/mean": 2e-4 * 1.2**step},
        config={"rollout": {"max_off_policy_steps": 1}},
    )
    found = learning.growing_mismatch(run)
    assert found and found.knob == "a lower optim.lr"


def test_a_gap_on_the_first_step_is_not_staleness(tmp_path: Path) -> None:
    run = observed(tmp_path, 3, training=lambda step: {"mismatch_kl/all/mean": 0.05})
    found = learning.mismatch_from_the_start(run)
    assert found and "5.0e-02 in the first steps" in found.evidence and "top_p=1" in found.knob
    later = observed(tmp_path / "b", 9, training=lambda step: {"mismatch_kl/all/mean": 0.01 * (step - 1)})
    assert learning.mismatch_from_the_start(later) is None


def test_entropy_collapse(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, training=lambda step: {"entropy/all/mean": 0.8**step})
    assert learning.entropy_collapse(run) is None, "it only fell to a tenth"
    run = observed(tmp_path / "b", 12, training=lambda step: {"entropy/all/mean": 0.5**step})
    found = learning.entropy_collapse(run)
    assert (
        found and "at a reward of 0.500" in found.evidence and found.knob == "optim.lr=0.0001 (it is 0.0003)"
    )


def test_a_policy_that_earns_everything_need_not_explore(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, lambda step: {REWARD: 0.99}, lambda step: {"entropy/all/mean": 0.5**step})
    assert learning.entropy_collapse(run) is None


def test_gradient_spikes(tmp_path: Path) -> None:
    run = observed(tmp_path, 20, training=lambda step: {"optim/grad_norm": 90.0 if step == 13 else 0.5})
    found = learning.gradient_spikes(run)
    assert found and found.severity == "notice" and "90 at step 13, usually 0.5" in found.evidence
    assert found.knob == "optim.max_norm=1 (it is 1.0)"
    run = observed(tmp_path / "b", 20, training=lambda step: {"optim/grad_norm": 90.0 if step > 17 else 0.5})
    found = learning.gradient_spikes(run)
    assert found and found.severity == "trouble" and "3 such steps" in found.evidence


def test_a_loss_that_is_no_number_is_absent_from_the_stream(tmp_path: Path) -> None:
    run = observed(tmp_path, 12, training=lambda step: {"loss/mean": None if step > 9 else 0.1})  # type: ignore[dict-item]
    found = learning.lost_numbers(run)
    assert found and found.severity == "down" and "3 of 12 steps" in found.evidence
    assert "first at step 10" in found.evidence


@pytest.mark.parametrize(
    ("longest", "knob"),
    [(64, "rollout.sampling.max_tokens=128 (it is 64)"), (None, "inference.max_model_len=1024 (it is 512)")],
)
def test_truncation(tmp_path: Path, longest: int | None, knob: str) -> None:
    config = {"rollout": {"sampling": {"max_tokens": longest}}}
    run = observed(tmp_path, 12, lambda step: {TRUNCATED: 0.35}, config=config)
    found = learning.truncation(run)
    assert found and found.evidence.startswith("35% of") and found.knob.startswith(knob)


def test_a_reward_that_does_not_move(tmp_path: Path) -> None:
    run = observed(tmp_path, 45, lambda step: {REWARD: 0.3 + 0.01 * (step % 2)})
    found = learning.flat_reward(run)
    assert found and found.name == "flat reward" and found.knob == "optim.lr=0.0009 (it is 0.0003)"
    assert learning.flat_reward(observed(tmp_path / "b", 29, lambda step: {REWARD: 0.3})) is None, "too early"
    assert learning.flat_reward(observed(tmp_path / "c", 45, lambda step: {REWARD: 0.99})) is None, "solved"


def test_a_reward_that_falls(tmp_path: Path) -> None:
    run = observed(tmp_path, 45, lambda step: {REWARD: 0.6 if step < 25 else 0.2})
    found = learning.flat_reward(run)
    assert found and found.severity == "trouble" and "fell from 0.600 to 0.200" in found.evidence
