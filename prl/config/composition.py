"""Composes chosen options with Hydra's own functions and sets keys one by one.

Hydra composes its own settings with every config; that is half of the work, and nobody reads them outside a
sweep. So they are left out unless a word speaks of them. Keys are set one after the other, where Hydra stops
at the first that it cannot set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.config_repository import IConfigRepository
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig


def choose(loader: ConfigLoaderImpl, config_name: str, lines: Sequence[str]) -> DictConfig:
    """The tree of the options that `lines` choose, before any key is set; closed to unknown keys.

    Raises what Hydra raises for options that do not exist or do not fit.
    """
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    config = None
    if not any(_speaks_of_hydra(line) for line in lines):
        try:
            config = _without_hydra(loader, config_name, lines)
        except (HydraException, OmegaConfBaseException):
            config = None  # an option chooses among Hydra's own settings, or there is a fault: Hydra tells
    if config is None:
        config = loader.load_configuration(config_name, list(lines), RunMode.RUN, from_shell=False)
        with open_dict(config):
            config.pop("hydra")
    OmegaConf.set_struct(config, True)
    return config


def set_key(config: DictConfig, override: Override) -> bool:
    """Set one key as Hydra would; a key that is not there is added too, for the checks to judge.

    A sweep sets its first value. Returns whether the word does so as it stands, or would need `++`.
    Raises HydraException, e.g. for `+key=` where the key is there already.
    """
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.types import OverrideType
    from hydra.errors import HydraException
    from omegaconf.errors import ConfigAttributeError, ConfigKeyError

    if override.is_sweep_override():
        override = dataclasses.replace(override, _value=_first(override))
    try:
        ConfigLoaderImpl._apply_overrides_to_config([override], config)
        return True
    except HydraException as error:
        absent = isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError)
        if override.type != OverrideType.CHANGE or not absent:
            raise
    forced = dataclasses.replace(override, type=OverrideType.FORCE_ADD)
    ConfigLoaderImpl._apply_overrides_to_config([forced], config)
    return False


def _first(override: Override) -> Any:
    """The first value of a sweep; of an interval its start."""
    from hydra.core.override_parser.types import IntervalSweep

    if isinstance(override._value, IntervalSweep):
        return override._value.start
    return next(iter(override.sweep_iterator()))


def _speaks_of_hydra(line: str) -> bool:
    word = line.lstrip("+~")
    return word.startswith("hydra") and not word.startswith("hydra.searchpath=")


def _without_hydra(loader: ConfigLoaderImpl, config_name: str, lines: Sequence[str]) -> DictConfig:
    """What `ConfigLoaderImpl.load_configuration` does, up to its own settings."""
    from hydra._internal.defaults_list import create_defaults_list
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import open_dict

    repository = _cached(loader.repository)
    loader.ensure_main_config_source_available()
    overrides = OverridesParser.create().parse_overrides([*lines, "~hydra"])
    loader._process_config_searchpath(config_name, overrides, repository)
    choices = [override for override in overrides if not override.is_hydra_override()]
    defaults = create_defaults_list(
        repo=repository,
        config_name=config_name,
        overrides_list=choices,
        prepend_hydra=False,
        skip_missing=False,
    )
    config = loader._compose_config_from_defaults_list(defaults=defaults.defaults, repo=repository)
    with open_dict(config):
        config.pop("hydra", None)
    return config


def _cached(repository: IConfigRepository) -> Any:
    """Each file is read once. Hydra's class copies all sources first; these are this call's own."""
    from hydra._internal.config_repository import CachingConfigRepository

    cached = CachingConfigRepository.__new__(CachingConfigRepository)
    cached.delegate, cached.cache = repository, {}
    return cached
