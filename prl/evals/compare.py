"""`prl eval compare A B`: two evaluations task by task, with a paired bootstrap of the difference."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from prl.evals.ledger import STREAM, Row
from prl.evals.results import reward_tables, rows_of
from prl.evals.statistics import Comparison, Table, compare
from prl.evals.tables import plain_table
from prl.run_dir import RunDir

USAGE = """usage: python -m prl eval compare A[@STEP] B[@STEP] [--tasks N]
A and B are run directories of evaluations; @STEP chooses one of several checkpoints (the last, if left out).
--tasks N lists the N tasks with the largest change (10)."""
REFUSED = 2


def main(words: Sequence[str]) -> int:
    """The job of `prl eval compare`; the exit code."""
    if "--help" in words or "-h" in words:
        print(USAGE)
        return 0
    try:
        runs, limit = _arguments(list(words))
        (first, lost), (second, lost_too) = (_load(run) for run in runs)
        print("\n".join([*describe(runs[0], first, runs[1], second, limit), *failures(lost, lost_too)]))
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


Tables = dict[tuple[str, str], dict[str, list[float]]]
"""(environment, agent) -> task -> rewards."""


def describe(name_a: str, a: Tables, name_b: str, b: Tables, limit: int) -> Iterator[str]:
    """The whole report, line by line. Raises ValueError if the two have no task in common."""
    yield f"A  {name_a}\nB  {name_b}\n"
    rows = [["env", "agent", "tasks", "A", "B", "B − A [95 %]", "B wins", "A wins", "ties", "verdict"]]
    compared = {key: found for key in a if key in b and (found := compare(a[key], b[key])) is not None}
    if not compared:
        raise ValueError(f"{name_a} and {name_b} have no measured task in common; nothing can be compared")
    rows += [_row(key, found, a[key], b[key]) for key, found in compared.items()]
    yield plain_table(rows)
    for key in a.keys() | b.keys():
        alone = [
            len({task for task in x.get(key, {}) if x[key][task]} - _tasks(y, key))
            for x, y in ((a, b), (b, a))
        ]
        if any(alone):
            yield f"{'/'.join(key)}: {alone[0]} tasks only in A, {alone[1]} only in B; they are left out"
    changed = [
        (mean_of(b[key][task]) - mean_of(a[key][task]), key, task)
        for key in compared
        for task in a[key].keys() & b[key].keys()
        if a[key][task] and b[key][task]
    ]
    worst = sorted((item for item in changed if item[0]), key=lambda item: (-abs(item[0]), item[1:]))[:limit]
    if worst:
        yield f"\nlargest changes (of {sum(bool(item[0]) for item in changed)} tasks that changed):"
        table = [["env", "agent", "task", "A", "B", "B − A"]]
        for delta, key, task in worst:
            table.append(
                [
                    *key,
                    task[:16],
                    f"{mean_of(a[key][task]):.3f}",
                    f"{mean_of(b[key][task]):.3f}",
                    f"{delta:+.3f}",
                ]
            )
        yield plain_table(table)


def failures(a: Mapping[str, int], b: Mapping[str, int]) -> Iterator[str]:
    """How many rollouts of each environment failed and are in no number above; nothing where none did."""
    for env in sorted(a.keys() | b.keys()):
        yield f"\n{env}: {a.get(env, 0)} rollouts failed in A, {b.get(env, 0)} in B; they are left out"


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _row(key: tuple[str, str], found: Comparison, a: Table, b: Table) -> list[str]:
    common = [task for task in a if a[task] and b.get(task)]
    means = [mean_of([mean_of(table[task]) for task in common]) for table in (a, b)]
    difference = found.difference
    interval = "" if difference.low is None else f" [{difference.low:+.3f}, {difference.high:+.3f}]"
    verdict = "no clear difference"
    if found.significant:
        verdict = "B is better" if difference.mean > 0 else "A is better"
    counts = [str(found.wins), str(found.losses), str(found.ties)]
    return [
        *key, str(difference.tasks), *(f"{mean:.3f}" for mean in means),
        f"{difference.mean:+.3f}{interval}", *counts, verdict,
    ]  # fmt: skip


def _tasks(tables: Tables, key: tuple[str, str]) -> set[str]:
    return {task for task, rewards in tables.get(key, {}).items() if rewards}


def _arguments(words: list[str]) -> tuple[list[str], int]:
    limit = 10
    if "--tasks" in words:
        place = words.index("--tasks")
        if place + 1 >= len(words) or not words[place + 1].isdecimal():
            raise ValueError("--tasks: a number must follow")
        limit = int(words[place + 1])
        del words[place : place + 2]
    if unknown := [word for word in words if word.startswith("-")]:
        raise ValueError(f"{unknown[0]}: no such flag\n{USAGE}")
    if len(words) != 2:
        raise ValueError(f"two evaluations are compared, {len(words)} were given\n{USAGE}")
    return words, limit


def _load(word: str) -> tuple[Tables, dict[str, int]]:
    """Tables of `run` or `run@step`, and failed rollouts by environment, where there are any.

    Raises ValueError if there is no such evaluation.
    """
    name, at, step = word.rpartition("@")
    stepped = bool(at) and step.isdecimal()
    path = Path(name if stepped else word).expanduser()
    run = RunDir(path)
    if not (run.traces / STREAM).is_file():
        reason = (
            "is not there" if not path.exists() else f"has no {run.traces.name}/{STREAM}: it is no evaluation"
        )
        raise ValueError(f"{path} {reason}; give its run directory, e.g. outputs/<run.name>")
    envs: dict[str, list[Row]] = defaultdict(list)
    for row in rows_of(run, int(step) if stepped else None).values():
        envs[row.key.env].append(row)
    if not envs:
        raise ValueError(f"{word}: no rollout of this step was finished")
    tables = {
        (env, agent): table for env, rows in envs.items() for agent, table in reward_tables(rows).items()
    }
    failed = {env: sum(not row.ok for row in rows) for env, rows in envs.items()}
    return tables, {env: count for env, count in failed.items() if count}
