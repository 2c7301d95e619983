"""Questions about the episodes of a run: a filtered page, the errors by type, the members of a group."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from prl.dashboard.episode_index import EpisodeIndex

SORTS = ("row", "step", "reward", "tokens", "turns", "seconds")
MOST_ROWS = 200
MOST_GROUP = 64
BINS = 20


@dataclass(frozen=True)
class Query:
    """What to show. None leaves a filter open; `error` is "any", "none" or a type."""

    step_from: int | None = None
    step_to: int | None = None
    env: str | None = None
    reward_from: float | None = None
    reward_to: float | None = None
    truncated: bool | None = None
    error: str | None = None
    attempt: int | None = None
    sort: str = "row"
    descending: bool = True
    start: int = 0
    limit: int = 50


def page(index: EpisodeIndex, query: Query) -> dict[str, Any]:
    """The rows that a query asks for, how many there are, and what the whole selection looks like."""
    columns = index.columns
    chosen = np.flatnonzero(_mask(index, columns, query))
    ordered = _ordered(columns, chosen, query)
    window = ordered[max(0, query.start) : max(0, query.start) + min(query.limit, MOST_ROWS)]
    return {
        "total": len(chosen),
        "of": len(columns["step"]),
        "share_read": index.share_read,
        "rows": [index.summary(int(number)) for number in window],
        "envs": sorted(index.envs.names),
        "errors": sorted({name for joined in index.errors.names for name in joined.split(", ") if name}),
        "attempts": sorted({int(number) for number in np.unique(columns["attempt"])}),
        "steps": [int(columns["step"].min()), int(columns["step"].max())] if len(columns["step"]) else None,
        "histogram": histogram(columns["reward"][chosen]),
        "truncated": int(columns["truncated"][chosen].sum()),
        "failed": int((columns["error"][chosen] != 0).sum()),
    }


def histogram(rewards: np.ndarray) -> dict[str, Any] | None:
    """`{"edges", "counts", "missing"}` of the rewards that are finite; None if none is."""
    finite = rewards[np.isfinite(rewards)]
    if not len(finite):
        return None
    low, high = float(finite.min()), float(finite.max())
    counts, edges = np.histogram(finite, bins=BINS, range=(low, high if high > low else low + 1.0))
    return {
        "edges": [float(edge) for edge in edges],
        "counts": [int(count) for count in counts],
        "missing": len(rewards) - len(finite),
    }


def group_of(index: EpisodeIndex, number: int) -> list[dict[str, Any]]:
    """Summaries of the episodes that share the group of row `number`, best reward first."""
    if not 0 <= number < len(index):
        raise IndexError(number)
    columns = index.columns
    rows = [index.summary(int(i)) for i in np.flatnonzero(columns["group"] == columns["group"][number])]
    return sorted(rows, key=lambda row: (-_reward(columns, row["row"]), row["row"]))[:MOST_GROUP]


def errors_by_type(index: EpisodeIndex) -> dict[str, Any]:
    """Per type: how many episodes, in which steps and environments, one example; and counts by step."""
    columns = index.columns
    steps = columns["step"]
    if not len(steps):
        return {"types": [], "episodes": 0, "edges": []}
    low, high = int(steps.min()), int(steps.max())
    width = max(1, math.ceil((high - low + 1) / 60))
    edges = np.arange(low, high + width + 1, width)
    types = []
    for name in sorted({name for joined in index.errors.names for name in joined.split(", ") if name}):
        found = np.flatnonzero(_has_error(index, columns, name))
        if len(found):
            types.append(_error_type(index, columns, name, found, edges))
    return {
        "types": sorted(types, key=lambda kind: -kind["count"]),
        "episodes": len(steps),
        "truncated": int(columns["truncated"].sum()),
        "edges": [int(edge) for edge in edges],
    }


def in_flight(index: EpisodeIndex, since: float, until: float, bins: int = 240) -> dict[str, list[float]]:
    """How many rollouts ran at each of `bins` times between two moments (epoch seconds)."""
    columns = index.columns
    ends = columns["finished_at"]
    starts = ends - columns["seconds"]
    times = np.linspace(since, until, bins)
    running = np.searchsorted(np.sort(starts), times, "right") - np.searchsorted(
        np.sort(ends), times, "right"
    )
    return {"x": [round(float(at), 3) for at in times], "y": [int(count) for count in running]}


def _mask(index: EpisodeIndex, columns: dict[str, np.ndarray], query: Query) -> np.ndarray:
    mask = np.ones(len(columns["step"]), bool)
    for name, low, high in (
        ("step", query.step_from, query.step_to),
        ("reward", query.reward_from, query.reward_to),
    ):
        if low is not None:
            mask &= columns[name] >= low
        if high is not None:
            mask &= columns[name] <= high
    if query.env is not None:
        mask &= columns["env"] == index.envs.find(query.env)
    if query.attempt is not None:
        mask &= columns["attempt"] == query.attempt
    if query.truncated is not None:
        mask &= columns["truncated"] == query.truncated
    if query.error is not None:
        mask &= _has_error(index, columns, query.error)
    return mask


def _has_error(index: EpisodeIndex, columns: dict[str, np.ndarray], error: str) -> np.ndarray:
    if error == "any":
        return columns["error"] != 0
    if error == "none":
        return columns["error"] == 0
    codes = [code for code, joined in enumerate(index.errors.names) if error in joined.split(", ")]
    return np.isin(columns["error"], codes)


def _ordered(columns: dict[str, np.ndarray], chosen: np.ndarray, query: Query) -> np.ndarray:
    """Rows in the asked order; a missing reward comes last either way, ties by the newest."""
    newest = chosen[::-1]
    if query.sort == "row":
        return newest if query.descending else chosen
    values = columns[query.sort][newest].astype(float)
    return newest[np.argsort(-values if query.descending else values, kind="stable")]


def _reward(columns: dict[str, np.ndarray], number: int) -> float:
    value = float(columns["reward"][number])
    return value if math.isfinite(value) else -math.inf


def _error_type(
    index: EpisodeIndex, columns: dict[str, np.ndarray], name: str, found: np.ndarray, edges: np.ndarray
) -> dict[str, Any]:
    steps = columns["step"][found]
    codes, counts = np.unique(columns["env"][found], return_counts=True)
    return {
        "type": name,
        "count": len(found),
        "first_step": int(steps.min()),
        "last_step": int(steps.max()),
        "envs": {index.envs.names[int(c)]: int(n) for c, n in zip(codes, counts, strict=True)},
        "example": int(found[-1]),
        "by_step": [int(count) for count in np.histogram(steps, bins=edges)[0]],
    }
