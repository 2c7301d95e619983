"""Metrics of one evaluation: `eval/<env>/{all,effective}/...`, the tree of training without `agg`.

`all`: every rollout; `effective`: those of trainable agents that ended without an error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from prl.evals.statistics import average, passes
from prl.orchestrator.metrics import Values, all_metrics, common_metrics
from prl.orchestrator.window import Fact, GroupReport

ONE_RESAMPLE = 1
"""Means are wanted here, no intervals."""


def eval_metrics(
    env: str, found: Sequence[tuple[str, list[Fact]]], group_size: int, version: int, size: int
) -> Values:
    """Values of the rollouts `found` (task key, the facts of its traces), of `size` that were due.

    `version`: the lowest policy version at which one of them started. `avg@k` is there in both subsets; a
    failed rollout counts 0 in `all` and not at all in `effective`. `pass@k` and `pass^k` are in `effective`,
    where every reward is 0 or 1.
    """
    tasks: dict[str, list[list[Fact]]] = defaultdict(list)
    for key, facts in found:
        tasks[key].append(facts)
    groups = [GroupReport(env, key, episodes, 0) for key, episodes in tasks.items()]
    good = [[fact for fact in facts if fact.error is None and fact.agent_trainable] for _, facts in found]
    whole, effective = f"eval/{env}/all/", f"eval/{env}/effective/"
    values = {whole + name: value for name, value in all_metrics(groups).items()}
    values |= {effective + name: value for name, value in common_metrics([f for f in good if f]).items()}
    for agent in sorted({fact.agent for _, facts in found for fact in facts}):
        values |= _scores(f"{whole}{agent}/", _table(tasks, agent, failed_counts=True), group_size, False)
        values |= _scores(f"{effective}{agent}/", _table(tasks, agent, failed_counts=False), group_size, True)
    values = {name: value for name, value in values.items() if not _of_training(name)}
    return values | {f"eval/{env}/policy_version": version, f"eval/{env}/coverage": len(found) / size}


def _table(tasks: dict[str, list[list[Fact]]], agent: str, *, failed_counts: bool) -> dict[str, list[float]]:
    table: dict[str, list[float]] = {}
    for key, episodes in tasks.items():
        facts = [fact for episode in episodes for fact in episode if fact.agent == agent]
        if failed_counts:
            table[key] = [0.0 if fact.reward is None else fact.reward for fact in facts]
        else:
            table[key] = [f.reward for f in facts if f.reward is not None and f.agent_trainable]
    return table


def _scores(prefix: str, table: dict[str, list[float]], group_size: int, with_passes: bool) -> Values:
    mean = average(table, resamples=ONE_RESAMPLE)
    if mean is None:
        return {}
    values = {f"{prefix}avg@{group_size}": mean.mean}
    if with_passes:
        at, hat = passes(table, resamples=ONE_RESAMPLE)
        values |= {f"{prefix}pass@{k}": estimate.mean for k, estimate in at.items()}
        values |= {f"{prefix}pass^{k}": estimate.mean for k, estimate in hat.items()}
    return values


def _of_training(name: str) -> bool:
    return name.endswith(("/is_trainable/mean", "/is_admitted/mean"))
