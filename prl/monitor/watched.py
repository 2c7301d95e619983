"""What one looks at while a run goes on: the questions, the metrics that answer them, what is healthy.

| question         | metric                                          | healthy                        |
|------------------|-------------------------------------------------|--------------------------------|
| progress         | `train/agg/effective/<agent>/reward/mean`       | rises over hundreds of steps   |
| truncation       | `train/agg/effective/<agent>/is_truncated/mean` | low                            |
| off-policy drift | `mismatch_kl/all/mean`                          | flat; growth precedes collapse |
| collapse         | `entropy/all/mean`                              | does not fall to zero          |
| divergence       | `optim/grad_norm`                               | no spikes                      |
| bottleneck       | `time/wait_for_batch` of the trainer,           | balanced                       |
|                  | `time/wait_for_policy` of the orchestrator      |                                |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prl.monitor.findings import ordered, recent, share
from prl.monitor.observed import Observed

TREND = 24
"""Steps that a trend shows."""
_BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Watched:
    """A watched value: the question it answers, its label, its column on the board, what is healthy."""

    question: str
    label: str
    column: str
    form: str
    healthy: str


WATCHED = (
    Watched("progress", "reward", "reward", "{:.3f}", "rises"),
    Watched("progress", "loss", "loss", "{:.4f}", ""),
    Watched("truncation", "truncated", "truncated", "{:.1%}", "low"),
    Watched("drift", "mismatch KL", "mismatch_kl", "{:.1e}", "flat"),
    Watched("collapse", "entropy", "entropy", "{:.3f}", "not to zero"),
    Watched("divergence", "grad norm", "grad_norm", "{:.3g}", "no spikes"),
    Watched("bottleneck", "trainer waits, s", "wait_for_batch", "{:.1f}", "balanced"),
    Watched("bottleneck", "rollouts wait, s", "wait_for_policy", "{:.1f}", "balanced"),
    Watched("failures", "failed", "errors", "{:.1%}", "near zero"),
)


@dataclass(frozen=True)
class Reading:
    """A watched value as it is: newest, mean of the recent steps, and its trend as a line of blocks."""

    watched: Watched
    now: str
    mean: str
    trend: str


def readings(observed: Observed) -> list[Reading]:
    """Every watched value that the run tells."""
    found = []
    for watched in WATCHED:
        curve = observed.board.curve(watched.column)
        if curve:
            points = ordered(curve)
            mean = recent(curve)
            assert mean is not None
            trend = sparkline(points[-TREND:])
            found.append(Reading(watched, watched.form.format(points[-1]), watched.form.format(mean), trend))
    return found


def sparkline(points: Sequence[float]) -> str:
    """Values as blocks between the lowest and the highest."""
    if not points:
        return ""
    low, high = min(points), max(points)
    reach = (high - low) or 1.0
    return "".join(
        _BLOCKS[min(int((point - low) / reach * len(_BLOCKS)), len(_BLOCKS) - 1)] for point in points
    )


def who_waits(observed: Observed) -> str | None:
    """`trainer 40%, rollouts 3% of the time`; None while nothing tells."""
    trainer = share(observed.board.curve("wait_for_batch"), observed.board.curve("step_time"))
    times = observed.curve("orchestrator", "time/step")
    rollouts = share(observed.curve("orchestrator", "time/wait_for_policy"), times)
    parts = [("trainer", trainer), ("rollouts", rollouts)]
    told = [f"{who} {waited:.0%}" for who, waited in parts if waited is not None]
    return f"{', '.join(told)} of the time" if told else None


def seconds_left(observed: Observed) -> float | None:
    """What the remaining steps take at the recent pace; None without an end or a pace."""
    pace = recent(observed.board.curve("step_time"))
    if observed.max_steps is None or pace is None:
        return None
    return pace * max(0, observed.max_steps - observed.step)


def spoken_time(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
