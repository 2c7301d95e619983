"""Diagnoses of running: who waits, what fails, what is thrown away, what the machine lacks."""

from __future__ import annotations

import re
from pathlib import Path

from prl.checkpoint.retention import complete_steps
from prl.monitor.findings import RECENT, Finding, recent, setting, share
from prl.monitor.observed import Observed, ending, silence

MOSTLY = 0.5
_REWARD_ERROR = re.compile(r"(?i)reward|scor|judge|rubric")
_TIMEOUT = re.compile(r"(?i)timeout")


def ended_badly(observed: Observed) -> Finding | None:
    """The launcher noted that the newest attempt failed or was stopped."""
    how = ending(observed.run)
    if how not in ("FAILED", "KILLED"):
        return None
    if how == "KILLED":
        return Finding("stopped", "notice", f"attempt {observed.run.attempt} was stopped", going_on(observed))
    where = f"{observed.run.logs} has its logs; STATUS.md has the reason"
    return Finding("failed", "down", f"attempt {observed.run.attempt} failed; {where}", going_on(observed))


def gone_silent(observed: Observed, now: float | None = None) -> Finding | None:
    """Neither an end nor a sign of life."""
    quiet = silence(observed, now)
    if quiet is None:
        return None
    evidence = f"nothing was told for {quiet / 60:.0f} min, and no end was noted"
    knob = f"look at {observed.run.logs}; if nothing runs: {going_on(observed)}"
    return Finding("silent", "down", evidence, knob)


def going_on(observed: Observed) -> str:
    """The overrides by which the run goes on; a training run without a checkpoint can only begin again."""
    own = setting(observed, "ckpt.dir")
    steps = complete_steps(Path(own) if own else observed.run.path / "checkpoints")
    resume = f"run.name={observed.name} run.resume=latest"
    if steps:
        return f"{resume}, which goes on from step {steps[-1]}"
    if own or observed.config.get("command") == "eval":
        return f"{resume}, which goes on from where it was"
    return f"run.name={observed.name} run.clean=true ckpt=interval: it has no checkpoint to go on from"


def starving_trainer(observed: Observed) -> Finding | None:
    """The trainer waits for rollouts most of the time."""
    waited = share(observed.board.curve("wait_for_batch"), observed.board.curve("step_time"))
    if waited is None or waited < MOSTLY or len(observed.board.rows) < 3:
        return None
    evidence = f"the trainer waited for rollouts {waited:.0%} of the newest {RECENT} steps"
    inflight = setting(observed, "rollout.max_inflight")
    batch = setting(observed, "rollout.batch_size", 0)
    now = inflight or batch
    knob = f"rollout.max_inflight={2 * now} (it is {now}), then more devices for inference"
    return Finding("starving trainer", "notice", evidence, knob)


def waiting_rollouts(observed: Observed) -> Finding | None:
    """Rollouts stand still most of the time because the trainer is slower."""
    times = observed.curve("orchestrator", "time/step")
    waited = share(observed.curve("orchestrator", "time/wait_for_policy"), times)
    if waited is None or waited < MOSTLY or len(times) < 3:
        return None
    evidence = f"rollouts waited for the trainer {waited:.0%} of the newest {RECENT} steps"
    ranks = setting(observed, "cluster.train_ranks", 1)
    return Finding("waiting rollouts", "notice", evidence, f"cluster.train_ranks={2 * ranks} (it is {ranks})")


def reward_errors(observed: Observed) -> Finding | None:
    """Rollouts that were not scored: a fault in a reward function, not in the policy."""
    errors = {name: n for name, n in observed.errors(RECENT).items() if _REWARD_ERROR.search(name)}
    if not errors:
        return None
    told = ", ".join(f"{name} {count}" for name, count in errors.items())
    knob = f"the reward function; the logs of the environments are in {observed.run.logs}/env"
    return Finding("reward errors", "trouble", f"in the newest {RECENT} steps: {told}", knob)


def failing_rollouts(observed: Observed) -> Finding | None:
    """More than one rollout in twenty fails."""
    failed = recent(observed.board.curve("errors"))
    if failed is None or failed < 0.05:
        return None
    types = observed.errors(RECENT)
    told = ", ".join(f"{name} {count}" for name, count in types.most_common(3))
    evidence = f"{failed:.0%} of the newest rollouts failed" + (f": {told}" if told else "")
    most = next(iter(dict(types.most_common(1))), "")
    if _TIMEOUT.search(most):
        knob = "env.<name>.timeout, twice of what it is"
    elif most == "PromptTooLong":
        context = setting(observed, "inference.max_model_len", 512)
        knob = f"inference.max_model_len={2 * context} (it is {context})"
    else:
        knob = f"the logs in {observed.run.logs}/env, then the errors in traces/stream.jsonl"
    return Finding("failing rollouts", "trouble", evidence, knob)


def thrown_away(observed: Observed) -> Finding | None:
    """Rollouts that were too old when their turn came were sampled for nothing."""
    dropped = observed.curve("orchestrator", "off_policy/dropped")
    wasted = share(dropped, observed.curve("orchestrator", "progress/rollouts"))
    if wasted is None or wasted < 0.2:
        return None
    bound = setting(observed, "rollout.max_off_policy_steps", 8)
    evidence = f"{wasted:.0%} of the newest rollouts were dropped as too old"
    knob = f"rollout.max_off_policy_steps={2 * max(1, bound)} (it is {bound})"
    return Finding("stale rollouts", "trouble", evidence, knob)


def slow_checkpoints(observed: Observed) -> Finding | None:
    """Saving takes more than a fifth of the time."""
    saved = observed.curve("trainer", "time/save_ckpt")
    steps = observed.board.curve("step_time")
    total = sum(steps.values())
    if len(saved) < 2 or not total or sum(saved.values()) / total < 0.2:
        return None
    interval = setting(observed, "ckpt.interval") or 1
    evidence = f"checkpoints took {sum(saved.values()) / total:.0%} of the time"
    return Finding("slow checkpoints", "notice", evidence, f"ckpt.interval={4 * interval} (it is {interval})")


def busy_loop(observed: Observed) -> Finding | None:
    """The orchestrator's event loop is late: everything in it is."""
    lag = observed.latest.get("orchestrator", {}).get("event_loop_lag/p99")
    if lag is None or lag < 0.5:
        return None
    inflight = setting(observed, "rollout.max_inflight") or setting(observed, "rollout.batch_size", 2)
    knob = f"rollout.max_inflight={max(1, inflight // 2)} (it is {inflight}), or more CPUs"
    return Finding("busy orchestrator", "notice", f"its event loop is {lag:.1f} s late (p99)", knob)


def full_machine(observed: Observed) -> Finding | None:
    """Memory or disk nearly full."""
    system = observed.latest.get("system", {})
    memory = system.get("system/system_memory_usage_percentage", 0.0)
    disk = system.get("system/disk_usage_percentage", 0.0)
    if memory > 95:
        return Finding("memory is full", "trouble", f"{memory:.0f}% in use", "a smaller trainer.seq_len")
    if disk > 97:
        knob = "ckpt.keep_last=2, or another output_dir"
        return Finding("disk is full", "trouble", f"{disk:.0f}% in use", knob)
    return None


RUNNING = (
    ended_badly,
    gone_silent,
    starving_trainer,
    waiting_rollouts,
    reward_errors,
    failing_rollouts,
    thrown_away,
    slow_checkpoints,
    busy_loop,
    full_machine,
)
