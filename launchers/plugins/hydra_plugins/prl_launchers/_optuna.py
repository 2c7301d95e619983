"""Hydra sweeper `optuna`: samples the swept values, for any launcher. Options as in hydra-optuna-sweeper."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class PrlOptunaConf:
    """What is sampled is what is swept: `optim.lr=tag(log,interval(1e-5,1e-3)) seed=1,2`."""

    _target_: str = "hydra_plugins.prl_launchers._optuna.PrlOptunaSweeper"
    sampler: str = "tpe"  # tpe, random or grid
    direction: str = "maximize"
    n_trials: int = 20
    n_jobs: int = 2  # trials at the same time
    storage: str | None = None  # null: sqlite in the sweep's directory, so that the same command goes on
    study_name: str | None = None
    seed: int | None = 0
    max_failure_rate: float = 1.0  # a batch with more failures than that share ends the sweep
    params: dict[str, Any] | None = field(default_factory=dict)


class PrlOptunaSweeper(Sweeper):
    """Asks for `n_jobs` trials, launches them as one batch, tells Optuna what they reached."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from hydra.core.plugins import Plugins

        self.config = config
        self.task_function = task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> None:
        from launchers.sweeps.search import search

        params = dict(self.options["params"] or {})
        words = [*(f"{key}={value}" for key, value in params.items()), *arguments]
        search(words, self.options, str(self.config.hydra.sweep.dir), self.launcher)


ConfigStore.instance().store(group="hydra/sweeper", name="optuna", node=PrlOptunaConf(), provider="prl")
