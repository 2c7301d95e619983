"""Who waited for whom: what trainer and orchestrator did in each step, on one clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prl.dashboard.series import Curve, MetricTable

TRAINER = (
    ("wait_for_batch", "waits for rollouts"),
    ("load_data", "loads the batch"),
    ("forward_backward", "trains"),
    ("broadcast_weights", "publishes weights"),
    ("save_ckpt", "saves"),
)
ORCHESTRATOR = (
    ("wait_for_policy", "waits for the trainer"),
    ("pack", "packs"),
    ("save_ckpt", "saves"),
)
MOST_STEPS = 200


def timeline(table: MetricTable, last: int = 60) -> dict[str, Any]:
    """The newest `last` steps as segments of lanes, and how much each side waited over the whole run.

    A step's line is written at its end; its parts are laid out backwards from there. The orchestrator's wait
    is the sum of its pauses in the step and is drawn at the step's beginning.
    """
    curves = table.curves()
    lanes = [
        _lane("trainer", curves, TRAINER, "collective and other", last),
        _lane("orchestrator", curves, ORCHESTRATOR, "collects rollouts", last),
    ]
    found = [lane for lane in lanes if lane["steps"]]
    shares = {lane["name"]: lane.pop("share_waiting") for lane in found}
    return {"lanes": found, "waiting": shares, "verdict": verdict(shares)}


def verdict(shares: dict[str, float | None]) -> str:
    """One sentence: which side is the bottleneck, from the shares of time that each side waited."""
    trainer, orchestrator = shares.get("trainer") or 0.0, shares.get("orchestrator") or 0.0
    if max(trainer, orchestrator) < 0.2:
        return "Neither side waits for more than a fifth of its time: trainer and rollouts are balanced."
    if trainer >= orchestrator:
        return (
            f"The trainer waits for rollouts {trainer:.0%} of the time: inference is the bottleneck. "
            "Give it more devices, or more rollouts in flight."
        )
    return (
        f"Rollouts wait for the trainer {orchestrator:.0%} of the time: training is the bottleneck. "
        "Give it more ranks, or a larger rollout.max_off_policy_steps."
    )


def _lane(
    name: str, curves: dict[str, Curve], parts: Iterable[tuple[str, str]], rest: str, last: int
) -> dict[str, Any]:
    totals = curves.get(f"{name}/time/step")
    if totals is None:
        return {"name": name, "steps": [], "share_waiting": None}
    found = {part: dict(_by_step(curves.get(f"{name}/time/{part}"))) for part, _ in parts}
    waited = sum(found[next(iter(found))].values())
    steps = sorted({int(step): (at, total) for step, at, total in _rows(totals)}.items())
    lane = {
        "name": name,
        "share_waiting": waited / total if (total := sum(length for _, (_, length) in steps)) else None,
        "steps": [
            _segments(step, at, length, [(what, found[part].get(step, 0.0)) for part, what in parts], rest)
            for step, (at, length) in steps[-min(last, MOST_STEPS) :]
        ],
    }
    return lane


def _segments(
    step: int, end: float, length: float, parts: list[tuple[str, float]], rest: str
) -> dict[str, Any]:
    """`[what, start, seconds]` of a step's parts in order; what none accounts for comes after the wait."""
    known = [(what, seconds) for what, seconds in parts if seconds > 0]
    other = length - sum(seconds for _, seconds in known)
    if other > 0.001:
        waits = 1 if known and known[0][0] == parts[0][0] else 0
        known.insert(waits, (rest, other))
    at, segments = end - length, []
    for what, seconds in known:
        segments.append([what, round(at, 4), round(seconds, 4)])
        at += seconds
    return {"step": step, "segments": segments}


def _by_step(curve: Curve | None) -> Iterable[tuple[int, float]]:
    return [(int(step), value) for step, _, value in _rows(curve)] if curve else []


def _rows(curve: Curve) -> list[tuple[float, float, float]]:
    rows = zip(curve.steps, curve.times, curve.values, strict=False)
    return [row for row in rows if row[0] == row[0]]
