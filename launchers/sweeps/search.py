"""A sweep whose values Optuna chooses: trial by trial, in batches that any of Hydra's launchers runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    IntervalSweep,
    Override,
    RangeSweep,
)
from hydra.core.utils import JobStatus

if TYPE_CHECKING:
    import optuna

SAMPLERS = ("tpe", "random", "grid")
DIRECTIONS = ("maximize", "minimize")


def search(words: Sequence[str], options: Mapping[str, Any], directory: str, launcher: Any) -> None:
    """Run trials until the study has `n_trials` that ended. Raises ValueError for options it cannot take.

    `words`: overrides; those with several values or an interval are sampled, the rest is common to all.
    `launcher`: a Hydra launcher; an element's return value is its objective, None or an exception a failure.
    """
    fixed, axes = split_axes(words)
    study = open_study(options, directory, axes)
    left = unfinished(study)
    while True:
        started = sum(trial.state.name != "WAITING" for trial in study.get_trials(deepcopy=False))
        room = min(options["n_jobs"], trials_of(options, axes) - started)
        batch, left = left[: options["n_jobs"]], left[options["n_jobs"] :]
        batch = batch or [study.ask(dict(axes)) for _ in range(room)]
        if not batch:
            return
        lines = [
            [*fixed, *(f"{key}={_text(value)}" for key, value in trial.params.items())] for trial in batch
        ]
        returns = launcher.launch(lines, initial_job_idx=batch[0].number)
        failures = sum(not _tell(study, trial, done) for trial, done in zip(batch, returns, strict=True))
        if failures / len(batch) > options["max_failure_rate"]:
            raise RuntimeError(
                f"{failures} of {len(batch)} trials failed; hydra.sweeper.max_failure_rate allows fewer"
            )


def trials_of(options: Mapping[str, Any], axes: Mapping[str, Any]) -> int:
    """Trials of the whole search: `n_trials`, or the points of a grid where these are fewer."""
    if options["sampler"] != "grid":
        return int(options["n_trials"])
    return min(int(options["n_trials"]), math.prod(len(_points(key, axis)) for key, axis in axes.items()))


def unfinished(study: optuna.Study) -> list[optuna.Trial]:
    """Trials that failed, or were at work when an earlier call was ended: they go on first."""
    import optuna

    left = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.RUNNING,))
    return [optuna.Trial(study, trial._trial_id) for trial in left]


def split_axes(words: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """(words without a sweep, distribution of each swept key)."""
    overrides = OverridesParser.create().parse_overrides(list(words))
    fixed = [override.input_line or "" for override in overrides if not override.is_sweep_override()]
    swept = [override for override in overrides if override.is_sweep_override()]
    return fixed, {override.get_key_element(): distribution(override) for override in swept}


def distribution(override: Override) -> optuna.distributions.BaseDistribution:
    """`a,b,c` one of them; `interval(a,b)` and `range(a,b,step)` numbers; `tag(log,interval(a,b))` on a log
    scale; `int(interval(a,b))` whole numbers."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    if isinstance(value, IntervalSweep):
        log = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return IntDistribution(value.start, value.end, log=log)
        return FloatDistribution(float(value.start or 0), float(value.end or 0), log=log)
    if isinstance(value, RangeSweep):
        numbers = list(override.sweep_iterator())
        return CategoricalDistribution(numbers)
    assert isinstance(value, ChoiceSweep), override.input_line
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def open_study(options: Mapping[str, Any], directory: str, axes: Mapping[str, Any]) -> optuna.Study:
    """The study of this sweep: a new one, or the one that an earlier call of the same command left."""
    for key, choices in (("sampler", SAMPLERS), ("direction", DIRECTIONS)):
        if options[key] not in choices:
            raise ValueError(f"hydra.sweeper.{key} = {options[key]}: valid: {', '.join(choices)}")
    try:
        import optuna
    except ModuleNotFoundError:
        raise ValueError("hydra/sweeper=optuna needs Optuna: pip install 'prl[optuna]'") from None

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    Path(directory).mkdir(parents=True, exist_ok=True)
    storage = options["storage"] or f"sqlite:///{Path(directory).resolve() / 'optuna.db'}"
    study = optuna.create_study(
        storage=storage,
        study_name=options["study_name"] or Path(directory).name,
        sampler=_sampler(options),
        direction=options["direction"],
        load_if_exists=True,
    )
    if options["sampler"] == "grid" and not study.trials:
        for values in itertools.product(*(_points(key, axis) for key, axis in axes.items())):
            study.enqueue_trial(dict(zip(axes, values, strict=True)))
    return study


def _points(key: str, axis: Any) -> list[Any]:
    """Values of one axis of a grid. Raises ValueError for an interval."""
    if not hasattr(axis, "choices"):
        raise ValueError(f"{key}: a grid needs a list of values, not an interval")
    return list(axis.choices)


def _sampler(options: Mapping[str, Any]) -> optuna.samplers.BaseSampler:
    """What asks where a grid has not set the values."""
    import optuna

    kind = optuna.samplers.TPESampler if options["sampler"] == "tpe" else optuna.samplers.RandomSampler
    return kind(seed=options["seed"])


def _tell(study: optuna.Study, trial: optuna.Trial, done: Any) -> bool:
    """Tell what a trial reached; False when it failed. It then stays open: the next call runs it again."""
    value = done._return_value if done.status == JobStatus.COMPLETED else None
    if isinstance(value, int | float) and math.isfinite(value):
        study.tell(trial, float(value))
        return True
    return False


def _text(value: Any) -> str:
    """A sampled value as an override says it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
