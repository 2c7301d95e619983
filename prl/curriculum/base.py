"""Curriculum of one environment: a sampler that learns from finished groups, and gates that judge them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

from prl.config.curriculum import CurriculumConfig, DifficultyPoolConfig
from prl.records import Episode


class Task(Protocol):
    """One task of an environment; `key` is unique within it."""

    @property
    def key(self) -> str: ...


T = TypeVar("T", bound=Task)
T_co = TypeVar("T_co", bound=Task, covariant=True)


class Sampler(Protocol[T_co]):
    """Which task comes next. States are JSON values."""

    def draw(self) -> T_co: ...

    def observe(self, key: str, reward: float) -> None:
        """Learns the mean reward over the trainable traces of a finished group of task `key`."""
        ...

    def metrics(self) -> dict[str, float]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Gate(Protocol):
    """Whether a finished group is trained."""

    def admits(self, group: Sequence[Episode]) -> bool: ...


class Curriculum(Generic[T]):
    """A sampler with gates, as the orchestrator uses it."""

    def __init__(self, env: str, sampler: Sampler[T], gates: dict[str, Gate]) -> None:
        self.env = env
        self.sampler = sampler
        self.gates = gates
        self._judged = self._admitted = 0
        self._passed = dict.fromkeys(gates, 0)

    def draw(self) -> T:
        """The task of the next group."""
        return self.sampler.draw()

    def admit(self, group: Sequence[Episode]) -> bool:
        """Shows a scored group to the sampler, then to every gate; True if all of them admit it.

        A group without a trainable trace teaches the sampler nothing. Raises ValueError unless all its
        episodes are of one task.
        """
        keys = {episode.task_key for episode in group}
        if len(keys) != 1 or not all(keys):
            raise ValueError(f"a group of env.{self.env} must have one task key, it has {sorted(keys)}")
        traces = [trace for episode in group for trace in episode.trainable_traces]
        rewards = [trace.reward for trace in traces if trace.reward is not None]
        if rewards:
            self.sampler.observe(keys.pop(), sum(rewards) / len(rewards))
        verdicts = {name: gate.admits(group) for name, gate in self.gates.items()}
        for name, passed in verdicts.items():
            self._passed[name] += passed
        admitted = all(verdicts.values())
        self._judged += 1
        self._admitted += admitted
        return admitted

    def metrics(self) -> dict[str, float]:
        """Rates over the groups judged since the last call, and the state of the sampler."""
        prefix = f"curriculum/{self.env}"
        values = {f"{prefix}/sampler/{name}": value for name, value in self.sampler.metrics().items()}
        if self._judged:
            values[f"{prefix}/admission_rate"] = self._admitted / self._judged
            for name, count in self._passed.items():
                values[f"{prefix}/gate/{name}/admission_rate"] = count / self._judged
        self._judged = self._admitted = 0
        self._passed = dict.fromkeys(self.gates, 0)
        return values

    def state_dict(self) -> dict[str, Any]:
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sampler.load_state_dict(state)


def build_curriculum(
    config: CurriculumConfig, *, env: str, tasks: Sequence[T] | Iterator[T], endless: bool
) -> Curriculum[T]:
    """The curriculum of one environment over its tasks (a sequence, or an iterator if `endless`).

    Raises ValueError for wrong settings, an empty or ambiguous set of tasks, and a sampler that needs a
    finite set but got an endless one.
    """
    from prl.curriculum.advantage_range import AdvantageRange

    gates: dict[str, Gate] = {name: AdvantageRange(name, gate) for name, gate in config.gates.items()}
    return Curriculum(env, _build_sampler(config, env, tasks, endless), gates)


def _build_sampler(
    config: CurriculumConfig, env: str, tasks: Sequence[T] | Iterator[T], endless: bool
) -> Sampler[T]:
    from prl.curriculum.difficulty_pool import DifficultyPoolSampler
    from prl.curriculum.standard import EndlessSampler, StandardSampler

    if isinstance(config, DifficultyPoolConfig):
        if endless:
            raise ValueError(
                f"curriculum.name=difficulty_pool needs a finite set of tasks, env.{env} has no end; "
                "choose curriculum=standard"
            )
        return DifficultyPoolSampler(config, env, list(tasks))
    return EndlessSampler(iter(tasks)) if endless else StandardSampler(env, list(tasks))
