"""Composing is the same everywhere: short helpers, and no trace of the developer's own environment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from prl.config.compose import check_tree, compose_job, open_options
from prl.config.errors import ConfigErrors
from prl.config.overrides import OverrideReader


@pytest.fixture(autouse=True)
def clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run in an empty directory, with no PRL_OUTPUT_DIR."""
    monkeypatch.delenv("PRL_OUTPUT_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def rl():
    """Compose `prl rl` from overrides in one string."""
    return lambda *words, **kwargs: compose_job("rl", words, **kwargs)


@pytest.fixture
def refused():
    """The messages with which overrides are refused; fails when they are accepted."""

    def messages(*words: str, command: str = "rl", **kwargs: Any) -> list[str]:
        with pytest.raises(ConfigErrors) as caught:
            compose_job(command, words, **kwargs)
        return [str(problem) for problem in caught.value.problems]

    return messages


@pytest.fixture(scope="session")
def options() -> tuple[OverrideReader, dict[tuple[str, ...], DictConfig]]:
    """The reader of `prl rl`, for the whole session, and what was composed so far."""
    with open_options("rl", []) as opened:
        return opened.reader, {}


@pytest.fixture
def judge(options) -> Callable[..., list[str]]:
    """Messages about overrides. Choices of options are composed once, keys are set by Hydra's own function.

    Composing takes 0.2 s of CPU time; `test_rules_are_heard_when_composing` shows that nothing is lost.
    """
    reader, composed = options

    def messages(*words: str) -> list[str]:
        settled = reader.settle(words)
        keys = [line for line in settled.lines if line.startswith("++")]
        choices = tuple(line for line in settled.lines if line not in keys)
        if choices not in composed:
            composed[choices] = reader.loader.load_configuration("rl", list(choices), RunMode.RUN)
        config = copy.deepcopy(composed[choices])
        OmegaConf.set_struct(config, False)
        ConfigLoaderImpl._apply_overrides_to_config(reader.parser.parse_overrides(keys), config)
        del config["hydra"]
        tree = OmegaConf.to_container(config, resolve=True)
        assert isinstance(tree, dict)
        try:
            check_tree("rl", settled, {str(key): value for key, value in tree.items()}, True)
        except ConfigErrors as errors:
            return [str(problem) for problem in errors.problems]
        return []

    return messages
