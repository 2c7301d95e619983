"""Metrics of a shipped batch and of the window behind it, under the names that dashboards know.

`train/<agg or env>/all/...` speaks of everything that arrived since the last batch, `.../effective/...` of
exactly the traces shipped. A distribution has `mean max min p10 p90`; an empty one has no key.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from prl.orchestrator.sink import Entry
from prl.orchestrator.staleness import age_at
from prl.orchestrator.window import COUNTS, Fact, GroupReport, Window

Values = dict[str, float]
Cohort = list[list[Fact]]
"""Episodes: the traces of each that count."""


def batch_metrics(shipped: Sequence[Entry], window: Window, step: int) -> Values:
    """Every `train/*`, `batch/*`, `off_policy/*` and per-step `progress/*` value of batch `step`."""
    effective = _effective(shipped)
    envs = sorted({group.env for group in window.groups} | effective.keys())
    values: Values = {}
    for scope, members in [("agg", envs), *((env, [env]) for env in envs)]:
        groups = [group for group in window.groups if group.env in members]
        used = [episode for env in members for episode in effective.get(env, [])]
        values |= _prefixed(f"train/{scope}/all/", all_metrics(groups))
        values |= _prefixed(f"train/{scope}/effective/", common_metrics(used))
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


def _effective(shipped: Sequence[Entry]) -> dict[str, Cohort]:
    """By environment: the episodes with shipped traces, and those traces of each."""
    episodes: dict[str, dict[str, list[Fact]]] = defaultdict(dict)
    for entry in shipped:
        facts = episodes[entry.group.env].setdefault(entry.episode.id, [])
        facts.append(Fact.of(entry.trace, trainable=True, admitted=True))
    return {env: list(found.values()) for env, found in episodes.items()}


def common_metrics(cohort: Cohort) -> Values:
    """What both subsets have."""
    values: Values = {}
    for place, name in enumerate(COUNTS):
        values |= distribution(name, (sum(fact.counts[place] for fact in facts) for facts in cohort))
    for agent, facts in _by_agent(fact for episode in cohort for fact in episode).items():
        values |= _prefixed(f"{agent}/", _agent(facts))
    return values


def all_metrics(groups: list[GroupReport]) -> Values:
    """What the window has beside the common part: failures, cancellations, how groups were solved."""
    cohort = [episode for group in groups for episode in group.episodes]
    values = common_metrics(cohort)
    cancelled = sum(group.cancelled for group in groups)
    if total := len(cohort) + cancelled:
        failed = sum(any(fact.error for fact in episode) for episode in cohort)
        values |= {"has_error/mean": failed / total, "cancelled/mean": cancelled / total}
    for agent, facts in _by_agent(fact for episode in cohort for fact in episode).items():
        errors = Counter(fact.error for fact in facts if fact.error)
        own = {f"error/{name}": float(count) for name, count in errors.items()}
        own["has_error/mean"] = errors.total() / (len(facts) + cancelled)
        own["cancelled/mean"] = cancelled / (len(facts) + cancelled)
        values |= _prefixed(f"{agent}/", own | _solved(agent, groups))
    return values


def _solved(agent: str, groups: list[GroupReport]) -> Values:
    """Shares of groups that earned nothing, everything or something between; the spread within groups."""
    found = [_rewards(fact for fact in group.facts if fact.agent == agent) for group in groups]
    scored = [rewards for rewards in found if rewards]
    if not scored:
        return {}
    none = sum(sum(rewards) == 0 for rewards in scored) / len(scored)
    every = sum(all(reward == 1.0 for reward in rewards) for rewards in scored) / len(scored)
    spread = distribution("reward/group_spread", map(statistics.pstdev, scored))
    return {"solved_none": none, "solved_all": every, "solved_some": 1 - none - every} | spread


def _agent(facts: list[Fact]) -> Values:
    values = distribution("reward", _rewards(facts))
    for place, name in enumerate(COUNTS):
        values |= distribution(name, (fact.counts[place] for fact in facts))
    for table in ("timing", "metrics", "rewards"):
        values |= _columns(table, [fact.tables[table] for fact in facts])
    for flag in ("is_truncated", "is_completed"):
        values[f"{flag}/mean"] = sum(getattr(fact, flag) for fact in facts) / len(facts)
    values["is_trainable/mean"] = sum(fact.trainable for fact in facts) / len(facts)
    values["is_admitted/mean"] = sum(fact.admitted for fact in facts) / len(facts)
    return values | _stop_conditions(facts)


def _columns(kind: str, tables: list[Mapping[str, float | None]]) -> Values:
    """Per key over the traces that have it. An unscored entry (None) counts as 0, so that failures show."""
    columns: dict[str, list[float]] = defaultdict(list)
    for table in tables:
        for name, value in table.items():
            columns[name].append(0.0 if value is None else value)
    values: Values = {}
    for name, column in columns.items():
        values |= distribution(f"{kind}/{name}", column)
    return values


def _stop_conditions(facts: list[Fact]) -> Values:
    stops = [fact.stop_condition for fact in facts if fact.stop_condition is not None]
    cut = sum(fact.is_truncated and fact.stop_condition != "prompt_too_long" for fact in facts)
    values = {"stop_condition/generation_truncated": cut / len(facts)}
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
        "progress/tokens": window.num_tokens,
        "progress/rollouts": window.num_episodes,
        "progress/tasks": window.num_tasks,
        "progress/input_tokens": tokens - sampled,
        "progress/output_tokens": sampled,
        "progress/truncated_samples": window.truncated,
    }


def _by_agent(facts: Iterable[Fact]) -> dict[str, list[Fact]]:
    agents: dict[str, list[Fact]] = defaultdict(list)
    for fact in facts:
        agents[fact.agent].append(fact)
    return agents


def _rewards(facts: Iterable[Fact]) -> list[float]:
    """Rewards that were given; a failed trace has none, and 0 is never assumed."""
    return [fact.reward for fact in facts if fact.reward is not None]


def _prefixed(prefix: str, values: Values) -> Values:
    return {prefix + name: value for name, value in values.items()}
