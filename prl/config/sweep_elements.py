"""Which runs a sweep will make, as far as that can be known before its sweeper decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

from hydra.errors import HydraException

from prl.config.compose import Options
from prl.config.errors import NO_VALUE, ConfigErrors, Problem
from prl.config.overrides import Settled

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"

MOST = 256
"""Of another sweeper's grid, so many combinations are looked at; of a larger one each value by itself."""

SET_BY_SWEEP = ("run.name", "run.resume", "run.clean", "output_dir")
"""A sweep gives each element its own directory, `multirun/<sweep>/<number>`."""


def elements(options: Options) -> tuple[list[list[str]], list[Problem]]:
    """(overrides of each element of a sweep, what cannot be read or does not exist).

    For a sampling sweeper, the elements are those of the grid that it samples; of an interval both ends are
    taken. A choice that does not exist is left out, so that the others can be judged too. Raises ConfigErrors
    for what cannot be swept.
    """
    settled, config = options.settle(sweeps=True)
    if settled.problems and config is None:
        raise ConfigErrors(settled.problems)
    sweeper, params = _sweeper(options, settled)
    words = [*params, *settled.lines]
    _refuse_what_sweeps_set(words)
    overrides = options.reader.parser.parse_overrides(words)
    if sweeper != BASIC:
        return _grid([_values(override) for override in overrides]), settled.problems
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    try:
        (batch,) = BasicSweeper.split_arguments(overrides, None)
    except HydraException as error:
        raise ConfigErrors([Problem("--multirun", NO_VALUE, str(error).rstrip("."))]) from None
    return batch, settled.problems


def _sweeper(options: Options, settled: Settled) -> tuple[str, list[str]]:
    """(class of the chosen sweeper, the axes that its configuration holds, as words)."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    try:
        config = options.reader.loader.load_configuration(
            options.config_name, settled.first_choices, RunMode.MULTIRUN
        )
    except HydraException as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigErrors([Problem("--multirun", NO_VALUE, reason)]) from None
    sweeper = config.hydra.sweeper
    params = sweeper.get("params") or {}
    if OmegaConf.is_config(params):
        params = OmegaConf.to_container(params, resolve=True)
    return str(sweeper.get("_target_")), [f"{key}={value}" for key, value in params.items()]


def _refuse_what_sweeps_set(words: list[str]) -> None:
    taken = [word for word in words if word.lstrip("+~").split("=")[0] in SET_BY_SWEEP]
    remedy = "Remove it; hydra.sweep.dir=<directory> moves the sweep."
    reason = "a sweep names its runs itself: multirun/<sweep>/<number>"
    if taken:
        problems = [Problem(*word.lstrip("+~").partition("=")[::2], reason, remedy) for word in taken]
        raise ConfigErrors(problems)


def _grid(axes: list[list[str]]) -> list[list[str]]:
    """Every combination of the axes' words; of a large grid every value, the other axes at their first."""
    size = 1
    for axis in axes:
        size *= len(axis)
    if size <= MOST:
        return [list(element) for element in itertools.product(*axes)]
    first = [axis[0] for axis in axes]
    return [first, *_one_by_one(axes, first)]


def _one_by_one(axes: list[list[str]], first: list[str]) -> Iterator[list[str]]:
    for place, axis in enumerate(axes):
        for word in axis[1:]:
            yield [*first[:place], word, *first[place + 1 :]]


def _values(override: Override) -> list[str]:
    """The words that an axis stands for; both ends of an interval."""
    from hydra.core.override_parser.types import IntervalSweep

    if not override.is_sweep_override():
        return [override.input_line or ""]
    key = override.get_key_element()
    if isinstance(override._value, IntervalSweep):
        return [f"{key}={override._value.start}", f"{key}={override._value.end}"]
    return [f"{key}={value}" for value in override.sweep_string_iterator()]
