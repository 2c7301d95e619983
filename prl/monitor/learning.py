"""Diagnoses of learning: is there credit, does the policy stay itself, does the step stay sane."""

from __future__ import annotations

import math
import re

from prl.monitor.findings import Finding, ordered, over_agents, recent, setting, thirds, typical
from prl.monitor.observed import Observed

LOG_BYTES = 200_000


def zero_advantages(observed: Observed) -> Finding | None:
    """Groups whose members all earn the same teach a group-relative algorithm nothing."""
    carried = recent(over_agents(observed, "all", "is_trainable/mean"))
    empty = _skipped_batches(observed)
    if (carried is None or carried > 0.1) and empty < 3:
        return None
    none = recent(over_agents(observed, "all", "solved_none")) or 0.0
    every = recent(over_agents(observed, "all", "solved_all")) or 0.0
    facts = [] if carried is None else [f"{carried:.0%} of the newest rollouts carry credit"]
    facts += [f"{empty} batches were skipped because nothing in them did"] if empty else []
    facts += [f"groups that earn nothing {none:.0%}, everything {every:.0%}"] if none or every else []
    if setting(observed, "rollout.group_size") == 1:
        knob = "rollout.group_size=8: in a group of one there is nothing to compare with"
    elif every > none:
        knob = "curriculum=difficulty_pool, or harder tasks: these are solved every time"
    else:
        knob = "easier tasks, partial rewards, or a warm start (prl sft): these are never solved"
    return Finding("zero advantages", "trouble", "; ".join(facts), knob)


def growing_mismatch(observed: Observed) -> Finding | None:
    """The learner drifts from the policy that sampled; it precedes collapse."""
    found = thirds(observed.board.curve("mismatch_kl"), 9)
    if found is None or found[1] < 1e-3 or found[1] < 3 * max(found[0], 0.0):
        return None
    bound = setting(observed, "rollout.max_off_policy_steps", 8)
    knob = f"rollout.max_off_policy_steps={max(1, bound // 2)}" if bound > 1 else "a lower optim.lr"
    evidence = f"mismatch KL went from {found[0]:.1e} to {found[1]:.1e}"
    return Finding(
        "growing mismatch KL", "trouble", evidence, f"{knob} (it is {bound})" if bound > 1 else knob
    )


def mismatch_from_the_start(observed: Observed) -> Finding | None:
    """On the first step nothing is stale: a gap there is a difference between engine and trainer."""
    first = ordered(observed.board.curve("mismatch_kl"))[:2]
    if not first or min(first) < 0.01:
        return None
    evidence = f"mismatch KL is {min(first):.1e} in the first steps, before anything can be stale"
    knob = "rollout.sampling.top_p=1 rollout.sampling.top_k=-1, then the same precision in engine and trainer"
    return Finding("trainer and engine disagree", "trouble", evidence, knob)


def entropy_collapse(observed: Observed) -> Finding | None:
    """A policy that samples one answer only explores no more; harmless once it earns everything."""
    found = thirds(observed.board.curve("entropy"), 6)
    if found is None or found[1] > 0.05 or found[1] > 0.2 * found[0]:
        return None
    reward = recent(observed.board.curve("reward"))
    if reward is not None and reward > 0.95:
        return None
    evidence = f"entropy fell from {found[0]:.3f} to {found[1]:.3f} nats per token"
    evidence += "" if reward is None else f" at a reward of {reward:.3f}"
    return Finding("entropy collapse", "trouble", evidence, _lower_rate(observed))


def gradient_spikes(observed: Observed) -> Finding | None:
    """Single steps far out of line tear the policy away."""
    norms = observed.board.curve("grad_norm")
    usual = typical(ordered(norms))
    limit = 10 * usual
    spikes = {step: norm for step, norm in norms.items() if norm > limit > 0}
    if len(norms) < 8 or not spikes:
        return None
    step = max(spikes, key=lambda candidate: spikes[candidate])
    evidence = f"gradient norm {spikes[step]:.3g} at step {step}, usually {usual:.3g}"
    evidence += f"; {len(spikes)} such steps" if len(spikes) > 1 else ""
    clip = setting(observed, "optim.max_norm")
    knob = f"optim.max_norm={_round(2 * usual)} (it is {clip})"
    return Finding("gradient spikes", "notice" if len(spikes) == 1 else "trouble", evidence, knob)


def lost_numbers(observed: Observed) -> Finding | None:
    """Streams drop NaN and infinities, so a trained step without its loss had none."""
    lost = [step for step, row in observed.board.rows.items() if row.trained and row.loss is None]
    trained = [row for row in observed.board.rows.values() if row.trained]
    if not lost or len(trained) < 1:
        return None
    evidence = f"the loss of {len(lost)} of {len(trained)} steps is no number, first at step {min(lost)}"
    return Finding("loss is not a number", "down", evidence, _lower_rate(observed))


def truncation(observed: Observed) -> Finding | None:
    """Answers that are cut off earn less for their length, not for their content."""
    cut = recent(observed.board.curve("truncated"))
    if cut is None or cut < 0.2:
        return None
    longest = setting(observed, "rollout.sampling.max_tokens")
    if longest:
        knob = f"rollout.sampling.max_tokens={2 * longest} (it is {longest})"
    else:
        context = setting(observed, "inference.max_model_len", 512)
        knob = f"inference.max_model_len={2 * context} (it is {context}), and trainer.seq_len with it"
    return Finding("truncation", "trouble", f"{cut:.0%} of the newest trained rollouts were cut off", knob)


def flat_reward(observed: Observed) -> Finding | None:
    """Rewards that do not rise over thirty steps or more, or fall."""
    curve = observed.board.curve("reward")
    found = thirds(curve, 30)
    if found is None or found[0] > 0.95:
        return None
    before, after = found
    spread = math.sqrt(sum((value - before) ** 2 for value in ordered(curve)[: len(curve) // 3]) / len(curve))
    if after < before - 3 * spread - 0.02:
        evidence = f"mean reward fell from {before:.3f} to {after:.3f}"
        return Finding("falling reward", "trouble", evidence, _lower_rate(observed))
    if after > before + 0.01:
        return None
    rate = setting(observed, "optim.lr")
    knob = f"optim.lr={_round(3 * rate)} (it is {rate:g})" if rate else "a higher optim.lr"
    return Finding("flat reward", "notice", f"mean reward went from {before:.3f} to {after:.3f}", knob)


def _lower_rate(observed: Observed) -> str:
    rate = setting(observed, "optim.lr")
    return f"optim.lr={_round(rate / 3)} (it is {rate:g})" if rate else "a lower optim.lr"


def _skipped_batches(observed: Observed) -> int:
    """Batches without any credit, as the newest part of the orchestrator's log counts them."""
    path = observed.run.log_file("orchestrator")
    if not path.exists():
        return 0
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read().decode(errors="replace")
    return len(re.findall(r"batch \d+: none of \d+ rollouts carries credit", text))


def _round(value: float) -> str:
    """Two digits are enough for a hint."""
    return f"{value:.2g}"


LEARNING = (
    lost_numbers,
    zero_advantages,
    growing_mismatch,
    mismatch_from_the_start,
    entropy_collapse,
    gradient_spikes,
    truncation,
    flat_reward,
)
