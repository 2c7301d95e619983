"""standard: tasks in the order of their source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Generic, TypeVar

from prl.curriculum.base import Task

T = TypeVar("T", bound=Task)


def check_tasks(env: str, tasks: Sequence[Task]) -> None:
    """Raises ValueError when there is no task or when two share a key."""
    if not tasks:
        raise ValueError(f"env.{env} has no task")
    twice = [key for key, count in Counter(task.key for task in tasks).items() if count > 1]
    if twice:
        raise ValueError(f"env.{env}: task keys must be unique; {len(twice)} are not, such as {twice[0]!r}")


class StandardSampler(Generic[T]):
    """A finite set, over and over."""

    def __init__(self, env: str, tasks: Sequence[T]) -> None:
        check_tasks(env, tasks)
        self.tasks = tasks
        self.cursor = 0

    def draw(self) -> T:
        task = self.tasks[self.cursor % len(self.tasks)]
        self.cursor += 1
        return task

    def observe(self, key: str, reward: float) -> None:
        """The order does not depend on rewards."""

    def metrics(self) -> dict[str, float]:
        return {"cursor": float(self.cursor)}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = int(state["cursor"])


class EndlessSampler(Generic[T]):
    """An endless stream; restoring consumes what was drawn before."""

    def __init__(self, tasks: Iterator[T]) -> None:
        self.tasks = tasks
        self.cursor = 0

    def draw(self) -> T:
        self.cursor += 1
        return next(self.tasks)

    def observe(self, key: str, reward: float) -> None:
        """The order does not depend on rewards."""

    def metrics(self) -> dict[str, float]:
        return {"cursor": float(self.cursor)}

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.cursor == 0, "restore before the first draw"
        self.cursor = int(state["cursor"])
        next(islice(self.tasks, self.cursor, self.cursor), None)
