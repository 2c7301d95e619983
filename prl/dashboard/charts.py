"""The curated charts: what a researcher watches, in which order, and what a healthy curve looks like."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Chart:
    """Curves whose names match `pattern` share one chart. `hint` says what a healthy one looks like."""

    section: str
    title: str
    pattern: str
    hint: str
    log: bool = False


_AGENT = r"train/agg/effective/(?!num_)[^/]+"

CHARTS = (
    Chart("Progress", "Reward", _AGENT + r"/reward/mean", "rises over hundreds of steps"),
    Chart("Progress", "Evaluation", r"(eval/.*(avg_at_\d+|reward/mean)|avg_at_\d+)", "rises with the reward"),
    Chart("Progress", "Loss", r"(loss|eval_loss|val/loss)/mean", "for RL no measure of progress"),
    Chart(
        "Progress", "Groups solved", r"train/agg/all/[^/]+/solved_(none|some|all)", "some should stay high"
    ),
    Chart("Progress", "Truncated", _AGENT + r"/is_truncated/mean", "low; else raise sampling.max_tokens"),
    Chart("Progress", "Failed rollouts", r"train/agg/all/(has_error|cancelled)/mean", "near zero"),
    Chart("Stability", "Mismatch KL", r"mismatch_kl/all/(mean|max)", "flat; growth precedes collapse", True),
    Chart("Stability", "Entropy", r"entropy/all/mean", "must not fall to zero"),
    Chart("Stability", "Gradient norm", r"optim/grad_norm", "no spikes"),
    Chart("Stability", "Masked tokens", r"is_masked/mean", "a few per cent at most"),
    Chart("Stability", "Steps off policy", r"off_policy/(mean|max)", "within rollout.max_off_policy_steps"),
    Chart("Stability", "Learning rate", r"optim/lr", "follows the schedule"),
    Chart(
        "Speed",
        "Waiting (s)",
        r"(trainer/time/wait_for_batch|orchestrator/time/wait_for_policy)",
        "batch: give inference more; policy: give the trainer more",
    ),
    Chart("Speed", "Step time (s)", r"(trainer|orchestrator)/time/step", "both sides about equal"),
    Chart("Speed", "Trainer tokens/s", r"perf/throughput", "flat"),
    Chart("Speed", "Peak memory (GiB)", r"perf/peak_memory", "flat"),
    Chart("Speed", "Rollouts in flight", r"dispatcher/inflight/[^/]+", "full while rollouts are wanted"),
    Chart(
        "Speed",
        "Output tokens",
        _AGENT + r"/num_output_tokens/(mean|p90)",
        "grows slowly, stays below the limit",
    ),
)


def curated(names: Iterable[str]) -> list[dict[str, object]]:
    """The charts that a run has curves for, each with the names of its curves."""
    known = sorted(names)
    charts = []
    for chart in CHARTS:
        found = [name for name in known if re.fullmatch(chart.pattern, name)]
        if found:
            charts.append(
                {
                    "section": chart.section,
                    "title": chart.title,
                    "hint": chart.hint,
                    "log": chart.log,
                    "keys": found[:8],
                }
            )
    return charts
