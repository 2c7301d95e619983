"""Schema of `eval`: evaluations on verifiers environments while a run trains."""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.fields import opt
from prl.config.sources import EnvConfig, SamplingConfig, SelectConfig


@dataclass
class EvalEnvConfig(EnvConfig):
    """An environment to evaluate on: as one to train on, with an interval of its own."""

    interval: int | None = opt(
        None, "Evaluate on it every so many policy versions; null = `eval.interval`.", ge=1
    )


@dataclass
class OnlineEvalConfig:
    """Evaluations while training. An environment's own values win, field by field."""

    env: dict[str, EvalEnvConfig] = opt(
        factory=dict, doc="Environments to evaluate on, chosen by eval.env=[...]; none = no evaluation."
    )
    interval: int = opt(100, "Evaluate every so many policy versions, and at the last.", ge=1)
    group_size: int = opt(1, "Rollouts per task.", ge=1)
    select: SelectConfig = opt(factory=SelectConfig, doc="Which tasks of each environment.")
    sampling: SamplingConfig = opt(factory=SamplingConfig, doc="Sampling; null = left to the engine.")
    pin_version: bool = opt(
        True, "Engines keep their weights until an evaluation is complete; false = it may mix versions."
    )
    skip_first_step: bool = opt(False, "Do not evaluate before the first step.")
    retrigger_on_resume: bool = opt(
        False, "On resume from step K, evaluate what is due at K (it was, before the run ended)."
    )
    max_inflight: int | None = opt(
        None, "Evaluation rollouts in flight at most; null = as many as the run may have at all.", ge=1
    )
    seed: int | None = opt(
        None, "Seed of generated tasks; null = the run's seed + 1, so that none was trained on.", ge=0
    )
