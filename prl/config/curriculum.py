"""Schema of the `curriculum` group: the next task, the trained groups. Behaviour: `prl/curriculum/`."""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.fields import opt


@dataclass
class AdvantageRangeConfig:
    """Rejects a group whose advantages all lie in [reject_min, reject_max]."""

    reject_min: float = opt(0.0, "Lower end of the rejected range.")
    reject_max: float = opt(0.0, "Upper end of the rejected range.")


@dataclass
class CurriculumConfig:
    """What every curriculum has; `name` is its sampler."""

    name: str = opt(doc="Name of the sampler.")
    gates: dict[str, AdvantageRangeConfig] = opt(
        factory=dict, doc="Advantage ranges by a name of your choice; a group must pass all of them."
    )


@dataclass
class StandardConfig(CurriculumConfig):
    """Tasks in the order of their source, over and over."""

    name: str = "standard"


@dataclass
class PoolConfig:
    """Tasks up to one mean reward."""

    max_reward: float = opt(doc="Highest mean reward of a task of this pool (inclusive).")
    weight: float = opt(1.0, "Chance of each of its tasks, relative to the other pools' tasks.", ge=0)


@dataclass
class DifficultyPoolConfig(CurriculumConfig):
    """Draws tasks by how well their latest group did; needs a finite set of tasks."""

    name: str = "difficulty_pool"
    pools: dict[str, PoolConfig] = opt(
        factory=lambda: {
            "hard": PoolConfig(max_reward=0.25, weight=0.2),
            "normal": PoolConfig(max_reward=0.75, weight=1.0),
            "easy": PoolConfig(max_reward=1.0, weight=0.2),
        },
        doc="Pools by name; a task above all of them belongs to the last.",
    )
    unseen_weight: float = opt(1.0, "Weight of tasks that had no group yet.", ge=0)
    seed: int = opt(42, "Seed of the draw.", ge=0)
