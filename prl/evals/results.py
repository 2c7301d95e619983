"""From the ledger to numbers: per checkpoint, environment and agent, each with how much was measured.

`all` speaks of every rollout that was asked for, `effective` of those that ended well, from which every mean
comes. With `eval.errors=zero` a failed rollout counts as reward 0 of every agent of its environment.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prl.config.schema import EvalConfig
from prl.evals.ledger import Row, read_rows
from prl.evals.plan import Plan
from prl.evals.sources import Key
from prl.evals.statistics import Estimate, average, passes
from prl.run_dir import RunDir, write_atomic

FILE = "results.json"


@dataclass(frozen=True)
class AgentScore:
    """Scores of one agent. `rewards`: task -> rewards that entered them."""

    avg: Estimate
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]
    metrics: dict[str, float]
    truncated: float
    turns: float
    rewards: dict[str, list[float]] = field(repr=False)


@dataclass(frozen=True)
class Score:
    """One environment at one checkpoint. `missing` rollouts were asked for and not finished."""

    step: int
    env: str
    group_size: int
    tasks: int
    expected: int
    finished: int
    errors: dict[str, int]
    agents: dict[str, AgentScore]

    @property
    def missing(self) -> int:
        return self.expected - self.finished

    @property
    def failed(self) -> int:
        return sum(self.errors.values())


@dataclass(frozen=True)
class Results:
    """Everything that one evaluation measured."""

    run: str
    model: str
    errors_rule: str
    scores: list[Score]

    @property
    def complete(self) -> bool:
        """Whether every rollout that was asked for is there, failed ones included."""
        return bool(self.scores) and not any(score.missing for score in self.scores)

    def tree(self) -> dict[str, Any]:
        """What `results.json` holds: numbers, without single rewards."""
        scores = [dataclasses.asdict(score) for score in self.scores]
        for score, entry in zip(self.scores, scores, strict=True):
            entry |= {"missing": score.missing, "failed": score.failed}
            for agent in entry["agents"].values():
                agent.pop("rewards")
        head = {"run": self.run, "model": self.model, "complete": self.complete, "errors": self.errors_rule}
        return {**head, "scores": scores}


def collect(config: EvalConfig, run: RunDir) -> Results | None:
    """Results of what is in the ledger now; None before the first plan."""
    plan = Plan.read(run)
    if plan is None:
        return None
    parts: dict[tuple[int, str], list[Row]] = defaultdict(list)
    expected = plan.keys()
    for key, row in read_rows(run).items():
        if key in expected:
            parts[key.step, key.env].append(row)
    scores = [_score(config, plan, step, env, parts[step, env]) for step, env in plan.parts()]
    return Results(run.path.name, config.model.name, config.eval.errors, scores)


def write_results(results: Results, run: RunDir) -> None:
    write_atomic(run.path / FILE, json.dumps(results.tree(), indent=1))


def reward_tables(rows: Iterable[Row], zero_errors: bool = False) -> dict[str, dict[str, list[float]]]:
    """Agent -> task -> rewards, in the order of the rollouts. A task whose rollouts all failed has none."""
    ordered = sorted(rows, key=lambda row: row.key)
    agents = sorted({result.agent for row in ordered for result in row.agents}) or ["agent"]
    tables: dict[str, dict[str, list[float]]] = {agent: {} for agent in agents}
    for row in ordered:
        for agent in agents:
            rewards = tables[agent].setdefault(row.key.task, [])
            rewards += [result.reward for result in row.agents if result.agent == agent]
            rewards += [0.0] if zero_errors and not row.ok else []
    return tables


def _score(config: EvalConfig, plan: Plan, step: int, env: str, rows: list[Row]) -> Score:
    tables = reward_tables(rows, config.eval.errors == "zero")
    agents = {agent: _agent_score(config, agent, table, rows) for agent, table in tables.items()}
    return Score(
        step=step,
        env=env,
        group_size=plan.group_sizes[env],
        tasks=len(plan.tasks[env]),
        expected=len(plan.tasks[env]) * plan.group_sizes[env],
        finished=len(rows),
        errors=dict(Counter(row.errors[0] for row in rows if not row.ok)),
        agents={agent: score for agent, score in agents.items() if score is not None},
    )


def _agent_score(
    config: EvalConfig, agent: str, table: Mapping[str, list[float]], rows: list[Row]
) -> AgentScore | None:
    seed, resamples = config.seed, config.eval.resamples
    avg = average(table, seed, resamples)
    if avg is None:
        return None
    results = [result for row in rows for result in row.agents if result.agent == agent]
    columns: dict[str, list[float]] = defaultdict(list)
    for result in results:
        for name, value in result.metrics.items():
            columns[name] += [value] if value is not None else []
    pass_at, pass_hat = passes(table, seed, resamples)
    count = max(len(results), 1)
    return AgentScore(
        avg,
        pass_at,
        pass_hat,
        {name: sum(values) / len(values) for name, values in columns.items() if values},
        sum(result.truncated for result in results) / count,
        sum(result.turns for result in results) / count,
        dict(table),
    )


def metrics(score: Score) -> dict[str, float]:
    """The numbers of one environment under the names that evaluations in training use too."""
    head = f"eval/{score.env}"
    values: dict[str, float] = {
        f"{head}/all/has_error/mean": score.failed / max(score.finished, 1),
        f"{head}/all/rollouts": score.finished,
    }
    for agent, found in score.agents.items():
        own = f"{head}/effective/{agent}"
        values |= _interval(f"{own}/avg@{score.group_size}", found.avg)
        for k, estimate in found.pass_at.items():
            values |= _interval(f"{own}/pass@{k}", estimate)
        for k, estimate in found.pass_hat.items():
            values |= _interval(f"{own}/pass^{k}", estimate)
        values |= {f"{own}/metrics/{name}/mean": value for name, value in found.metrics.items()}
        values |= {f"{own}/is_truncated/mean": found.truncated, f"{own}/num_turns/mean": found.turns}
    return values


def _interval(name: str, estimate: Estimate) -> dict[str, float]:
    values = {name: estimate.mean}
    if estimate.low is not None and estimate.high is not None:
        values |= {f"{name}/low": estimate.low, f"{name}/high": estimate.high}
    return values


def rows_of(run: RunDir, step: int | None) -> dict[Key, Row]:
    """Rows of one checkpoint of a run: the last one evaluated where `step` is None."""
    rows = read_rows(run)
    steps = sorted({key.step for key in rows})
    chosen = steps[-1] if step is None and steps else step
    return {key: row for key, row in rows.items() if key.step == chosen}
