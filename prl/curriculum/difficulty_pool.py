"""difficulty_pool: draws tasks by the mean reward of their latest group."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import numpy as np

from prl.config.curriculum import DifficultyPoolConfig
from prl.curriculum.base import Task
from prl.curriculum.standard import check_tasks

T = TypeVar("T", bound=Task)


class DifficultyPoolSampler(Generic[T]):
    """Draws with replacement; a task has the weight of its pool, `unseen_weight` before its first group."""

    def __init__(self, config: DifficultyPoolConfig, env: str, tasks: Sequence[T]) -> None:
        check_tasks(env, tasks)
        pools = sorted(config.pools.items(), key=lambda item: item[1].max_reward)
        self.names = [name for name, _ in pools]
        self.bounds = [pool.max_reward for _, pool in pools]
        if not pools or len(set(self.bounds)) < len(pools):
            raise ValueError(f"curriculum.pools must have different max_reward values, got {self.bounds}")
        self.pool_weights = [pool.weight for _, pool in pools]
        self.unseen_weight = config.unseen_weight
        if not any([*self.pool_weights, self.unseen_weight]):
            raise ValueError("curriculum.pools: at least one weight must be positive")
        self.env = env
        self.tasks = tasks
        self.index = {task.key: i for i, task in enumerate(tasks)}
        self.rewards: dict[str, float] = {}
        self.weights = np.full(len(tasks), self.unseen_weight, dtype=np.float64)
        self.rng = np.random.default_rng(config.seed)

    def draw(self) -> T:
        """Raises RuntimeError when every task is in a pool of weight 0."""
        total = self.weights.sum()
        if total <= 0:
            raise RuntimeError(
                f"env.{self.env}: all {len(self.tasks)} tasks are in curriculum pools of weight 0"
            )
        return self.tasks[int(self.rng.choice(len(self.tasks), p=self.weights / total))]

    def observe(self, key: str, reward: float) -> None:
        """Tasks that the environment does not have (any more) are not remembered."""
        if key in self.index:
            self.rewards[key] = reward
            self.weights[self.index[key]] = self.pool_weights[self._pool(reward)]

    def metrics(self) -> dict[str, float]:
        """Number of tasks per pool."""
        sizes = Counter(self.names[self._pool(reward)] for reward in self.rewards.values())
        unseen = len(self.tasks) - len(self.rewards)
        return {"pool/unseen": float(unseen), **{f"pool/{name}": float(sizes[name]) for name in self.names}}

    def state_dict(self) -> dict[str, Any]:
        return {"rng": self.rng.bit_generator.state, "task_rewards": dict(self.rewards)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rng.bit_generator.state = state["rng"]
        for key, reward in state["task_rewards"].items():
            self.observe(key, float(reward))

    def _pool(self, reward: float) -> int:
        """The first pool whose bound is not below the reward; the last one above all bounds."""
        return min(bisect_left(self.bounds, reward), len(self.bounds) - 1)
