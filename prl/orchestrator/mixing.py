"""Which task comes next: environments by ratio, tasks by each environment's curriculum.

Draws form one sequence that no timing can change (unless a curriculum learns from rewards). A draw stays
pending until its group was used up (shipped, or dropped for a reason), and pending draws are part of the
state: a resumed run draws them again, first and in their old order, then goes on with the sequence, so that
no task is skipped.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


class Task(Protocol):
    """A task of an environment: its key, and the data that a rollout is made from (JSON)."""

    @property
    def key(self) -> str: ...

    @property
    def data(self) -> dict[str, Any]: ...


class TaskSource(Protocol):
    """One environment's tasks in the order to train on; `prl.curriculum.Curriculum`."""

    def draw(self) -> Task: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedTask:
    """A task that a state file gave back."""

    key: str
    data: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Draw:
    """A task drawn for one group; `index` is its place in the sequence."""

    index: int
    env: str
    task: Task


class TaskMixer:
    """Draws one task a group, from environments in proportion to their `ratios`."""

    def __init__(self, sources: Mapping[str, TaskSource], ratios: Mapping[str, float], seed: int) -> None:
        assert sources.keys() == ratios.keys(), "every environment needs tasks and a ratio"
        self._sources = dict(sources)
        self._ratios = [ratios[env] for env in self._sources]
        self._rng = random.Random(seed)
        self._count = 0
        self._pending: dict[int, Draw] = {}
        self._again: deque[Draw] = deque()

    def draw(self) -> Draw:
        """The next task of the sequence; those that a resumed run still owes come first."""
        if self._again:
            return self._again.popleft()
        env = self._rng.choices(list(self._sources), self._ratios)[0]
        draw = Draw(self._count, env, self._sources[env].draw())
        self._count += 1
        self._pending[draw.index] = draw
        return draw

    def settle(self, index: int) -> None:
        """The group of draw `index` was used up; a resumed run does not owe it."""
        self._pending.pop(index, None)

    def state_dict(self) -> dict[str, Any]:
        """JSON: the random state, the curricula, and the tasks drawn but not used up, in the order drawn."""
        return {
            "rng": list(self._rng.getstate()),
            "count": self._count,
            "sources": {env: source.state_dict() for env, source in self._sources.items()},
            "pending": [
                {"index": draw.index, "env": draw.env, "key": draw.task.key, "data": draw.task.data}
                for draw in sorted(self._pending.values(), key=lambda draw: draw.index)
            ],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ValueError when the state speaks of other environments than this run has."""
        if state["sources"].keys() != self._sources.keys():
            raise ValueError(
                f"the checkpoint is of env {sorted(state['sources'])}, this run has {sorted(self._sources)}; "
                "resume with the same environments, or with ckpt.skip_progress=true"
            )
        for env, source_state in state["sources"].items():
            self._sources[env].load_state_dict(source_state)
        version, internal, gauss = state["rng"]
        self._rng.setstate((version, tuple(internal), gauss))
        self._count = state["count"]
        draws = [Draw(p["index"], p["env"], SavedTask(p["key"], p["data"])) for p in state["pending"]]
        self._pending = {draw.index: draw for draw in draws}
        self._again = deque(draws)
