"""Metrics of a shipped batch and of the window behind it, under the names that dashboards know.

`train/<agg or env>/all/...` speaks of everything that arrived since the last batch, `.../effective/...` of
exactly the traces shipped. A distribution has `mean max min p10 p90`; an empty one has no key.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prl.orchestrator.sink import Entry
from prl.orchestrator.staleness import age_at
from prl.orchestrator.window import GroupReport, Window
from prl.records import Episode, Trace

Values = dict[str, float]
COUNTS = ("num_total_tokens", "num_input_tokens", "num_output_tokens", "num_turns", "num_branches")


@dataclass(frozen=True, slots=True)
class Fact:
    """One trace of a cohort with what is asked of it often."""

    trace: Trace
    counts: tuple[int, ...]
    trainable: bool
    admitted: bool

    @classmethod
    def of(cls, trace: Trace, trainable: bool, admitted: bool) -> Fact:
        total, sampled = trace.num_tokens, trace.num_sampled
        counts = (total, total - sampled, sampled, trace.num_turns, len(trace.branches))
        return cls(trace, counts, trainable, admitted)


Cohort = list[tuple[Episode, list[Fact]]]
"""Episodes with those of their traces that count."""


def batch_metrics(shipped: Sequence[Entry], window: Window, step: int) -> Values:
    """Every `train/*`, `batch/*`, `off_policy/*` and per-step `progress/*` value of batch `step`."""
    arrived, effective = _arrived(window), _effective(shipped)
    envs = sorted({episode.env for episode, _ in [*arrived, *effective]})
    values: Values = {}
    for scope, members in [("agg", envs), *((env, [env]) for env in envs)]:
        groups = [group for group in window.groups if group.env in members]
        both = ([item for item in cohort if item[0].env in members] for cohort in (arrived, effective))
        everything, used = both
        values |= _prefixed(f"train/{scope}/all/", _all(everything, groups))
        values |= _prefixed(f"train/{scope}/effective/", _common(used))
    return values | _off_policy(shipped, window, step) | _shares(shipped) | _progress(shipped, window)


def distribution(name: str, values: Iterable[float]) -> Values:
    """`name/{mean,max,min,p10,p90}`, percentiles by linear interpolation; nothing for no finite value."""
    ordered = sorted(value for value in values if math.isfinite(value))
    if not ordered:
        return {}
    return {
        f"{name}/mean": sum(ordered) / len(ordered),
        f"{name}/max": ordered[-1],
        f"{name}/min": ordered[0],
        f"{name}/p10": percentile(ordered, 0.1),
        f"{name}/p90": percentile(ordered, 0.9),
    }


def percentile(ordered: Sequence[float], share: float) -> float:
    """Value below which `share` of the sorted values lie, linear between neighbours."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _arrived(window: Window) -> Cohort:
    return [
        (episode, [Fact.of(t, t.id in window.trainable, t.id in window.admitted) for t in episode.traces])
        for episode in window.episodes
    ]


def _effective(shipped: Sequence[Entry]) -> Cohort:
    episodes: dict[str, tuple[Episode, list[Fact]]] = {}
    for entry in shipped:
        facts = episodes.setdefault(entry.episode.id, (entry.episode, []))[1]
        facts.append(Fact.of(entry.trace, trainable=True, admitted=True))
    return list(episodes.values())


def _common(cohort: Cohort) -> Values:
    """What both subsets have."""
    values: Values = {}
    for place, name in enumerate(COUNTS):
        values |= distribution(name, (sum(fact.counts[place] for fact in facts) for _, facts in cohort))
    for agent, facts in _by_agent(fact for _, some in cohort for fact in some).items():
        values |= _prefixed(f"{agent}/", _agent(facts))
    return values


def _all(cohort: Cohort, groups: list[GroupReport]) -> Values:
    """What the window has beside the common part: failures, cancellations, how groups were solved."""
    values = _common(cohort)
    cancelled = sum(group.cancelled for group in groups)
    if total := len(cohort) + cancelled:
        failed = sum(any(fact.trace.error for fact in facts) for _, facts in cohort)
        values |= {"has_error/mean": failed / total, "cancelled/mean": cancelled / total}
    for agent, facts in _by_agent(fact for _, some in cohort for fact in some).items():
        errors = Counter(fact.trace.error.type for fact in facts if fact.trace.error)
        own = {f"error/{name}": float(count) for name, count in errors.items()}
        own["has_error/mean"] = errors.total() / (len(facts) + cancelled)
        own["cancelled/mean"] = cancelled / (len(facts) + cancelled)
        values |= _prefixed(f"{agent}/", own | _solved(agent, groups))
    return values


def _solved(agent: str, groups: list[GroupReport]) -> Values:
    """Shares of groups that earned nothing, everything or something between; the spread within groups."""
    found = [_rewards(t for e in group.episodes for t in e.traces if t.agent == agent) for group in groups]
    scored = [rewards for rewards in found if rewards]
    if not scored:
        return {}
    none = sum(sum(rewards) == 0 for rewards in scored) / len(scored)
    every = sum(all(reward == 1.0 for reward in rewards) for rewards in scored) / len(scored)
    spread = distribution("reward/group_spread", map(statistics.pstdev, scored))
    return {"solved_none": none, "solved_all": every, "solved_some": 1 - none - every} | spread


def _agent(facts: list[Fact]) -> Values:
    traces = [fact.trace for fact in facts]
    values = distribution("reward", _rewards(traces))
    for place, name in enumerate(COUNTS):
        values |= distribution(name, (fact.counts[place] for fact in facts))
    for table in ("timing", "metrics", "rewards"):
        values |= _tables(table, [getattr(trace, table) for trace in traces])
    flags = {
        "is_truncated": [trace.is_truncated for trace in traces],
        "is_completed": [trace.is_completed for trace in traces],
        "is_trainable": [fact.trainable for fact in facts],
        "is_admitted": [fact.admitted for fact in facts],
    }
    values |= {f"{name}/mean": sum(flag) / len(facts) for name, flag in flags.items()}
    return values | _stop_conditions(traces)


def _tables(kind: str, tables: list[Mapping[str, float | None]]) -> Values:
    """Per key over the traces that have it. An unscored entry (None) counts as 0, so that failures show."""
    columns: dict[str, list[float]] = defaultdict(list)
    for table in tables:
        for name, value in table.items():
            columns[name].append(0.0 if value is None else value)
    values: Values = {}
    for name, column in columns.items():
        values |= distribution(f"{kind}/{name}", column)
    return values


def _stop_conditions(traces: list[Trace]) -> Values:
    stops = [trace.stop_condition for trace in traces if trace.stop_condition is not None]
    cut = sum(trace.is_truncated and trace.stop_condition != "prompt_too_long" for trace in traces)
    values = {"stop_condition/generation_truncated": cut / len(traces)}
    return values | {f"stop_condition/{name}": count / len(stops) for name, count in Counter(stops).items()}


def _off_policy(shipped: Sequence[Entry], window: Window, step: int) -> Values:
    ages = [age_at(entry.episode.policy, step) for entry in shipped if entry.episode.policy]
    values: Values = {"off_policy/dropped": window.stale}
    if ages:
        columns = {
            "off_policy": [age.total for age in ages],
            "off_policy/in_flight": [age.in_flight for age in ages],
            "off_policy/in_queue": [age.in_queue for age in ages],
        }
        for name, column in columns.items():
            values |= {f"{name}/mean": sum(column) / len(column), f"{name}/max": max(column)}
    return values


def _shares(shipped: Sequence[Entry]) -> Values:
    counts = Counter(entry.group.env for entry in shipped)
    return {f"batch/{env}": count / len(shipped) for env, count in counts.items()}


def _progress(shipped: Sequence[Entry], window: Window) -> Values:
    samples = [sample for entry in shipped for sample in entry.built.samples]
    tokens = sum(map(len, samples))
    sampled = sum(sum(sample.mask) for sample in samples)
    return {
        "progress/tokens": sum(trace.num_tokens for trace in window.traces),
        "progress/rollouts": sum(1 for _ in window.episodes),
        "progress/tasks": len({(group.env, group.task_key) for group in window.groups}),
        "progress/input_tokens": tokens - sampled,
        "progress/output_tokens": sampled,
        "progress/truncated_samples": window.truncated,
    }


def _by_agent(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    agents: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        agents[fact.trace.agent].append(fact)
    return agents


def _rewards(traces: Iterable[Trace]) -> list[float]:
    """Rewards that were given; a failed trace has none, and 0 is never assumed."""
    return [t.reward for t in traces if t.error is None and t.reward is not None and math.isfinite(t.reward)]


def _prefixed(prefix: str, values: Values) -> Values:
    return {prefix + name: value for name, value in values.items()}
