"""What an evaluation promised to measure: `plan.json`. Results say of each number how much of it is there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from prl.evals.sources import Key
from prl.run_dir import RunDir, write_atomic

FILE = "plan.json"


@dataclass(frozen=True)
class Plan:
    """Rollouts per task and task keys, by environment, for each checkpoint of `steps` ([0]: none)."""

    group_sizes: dict[str, int]
    tasks: dict[str, list[str]]
    steps: list[int]

    def parts(self) -> Iterator[tuple[int, str]]:
        """Every (step, environment)."""
        for step in self.steps:
            for env in self.tasks:
                yield step, env

    def keys(self) -> set[Key]:
        """Every rollout that was asked for."""
        return {
            Key(step, env, task, rollout)
            for step, env in self.parts()
            for task in self.tasks[env]
            for rollout in range(self.group_sizes[env])
        }

    def write(self, run: RunDir) -> None:
        tree = {"steps": self.steps, "group_sizes": self.group_sizes, "tasks": self.tasks}
        write_atomic(run.path / FILE, json.dumps(tree, indent=1))

    @classmethod
    def read(cls, run: RunDir) -> Plan | None:
        """The plan of the newest attempt; None if none came so far."""
        try:
            tree = json.loads((run.path / FILE).read_text())
        except FileNotFoundError:
            return None
        return cls(tree["group_sizes"], tree["tasks"], tree["steps"])
