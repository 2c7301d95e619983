"""What a diagnosis finds, and the small sums that diagnoses are made of."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prl.monitor.observed import Observed

RECENT = 10
"""Steps that "now" means."""

Severity = Literal["down", "trouble", "notice"]


@dataclass(frozen=True)
class Finding:
    """A likely trouble: its name, what speaks for it, and the one knob to try first."""

    name: str
    severity: Severity
    evidence: str
    knob: str


def recent(curve: Mapping[int, float], steps: int = RECENT) -> float | None:
    """Mean of the newest `steps` points; None without any."""
    points = ordered(curve)[-steps:]
    return statistics.fmean(points) if points else None


def ordered(curve: Mapping[int, float]) -> list[float]:
    """Values in the order of their steps."""
    return [value for _, value in sorted(curve.items())]


def thirds(curve: Mapping[int, float], least: int) -> tuple[float, float] | None:
    """(mean of the first third, mean of the last third); None with fewer than `least` points."""
    points = ordered(curve)
    if len(points) < max(least, 3):
        return None
    part = len(points) // 3
    return statistics.fmean(points[:part]), statistics.fmean(points[-part:])


def over_agents(observed: Observed, subset: str, name: str) -> dict[int, float]:
    """`train/agg/<subset>/<agent>/<name>` by step, averaged over the agents that have it."""
    pattern = re.compile(rf"train/agg/{subset}/[^/]+/{re.escape(name)}")
    curves = observed.curves.get("orchestrator", {})
    by_step: dict[int, list[float]] = {}
    for key, curve in curves.items():
        if pattern.fullmatch(key):
            for step, value in curve.items():
                by_step.setdefault(step, []).append(value)
    return {step: statistics.fmean(values) for step, values in by_step.items()}


def share(part: Mapping[int, float], whole: Mapping[int, float], steps: int = RECENT) -> float | None:
    """Sum of `part` over sum of `whole` in the newest `steps` steps that both have; None without any."""
    common = sorted(part.keys() & whole.keys())[-steps:]
    total = sum(whole[step] for step in common)
    return sum(part[step] for step in common) / total if total > 0 else None


def setting(observed: Observed, path: str, default: Any = None) -> Any:
    """A value of the resolved config by its dotted path."""
    node: Any = observed.config
    for key in path.split("."):
        if not isinstance(node, dict) or key not in node:
            return default
        node = node[key]
    return node


def typical(values: Sequence[float]) -> float:
    """The median; 0 for nothing."""
    return statistics.median(values) if values else 0.0
