"""Composing is the same everywhere: short helpers, and no trace of the developer's own environment."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from prl.config.compose import Options, check_tree, compose_job, open_options, plain
from prl.config.composition import choose
from prl.config.errors import ConfigErrors


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
def options() -> tuple[Options, dict[tuple[str, ...], DictConfig]]:
    """The options of `prl rl`, for the whole session, and what was composed so far."""
    with open_options("rl", []) as opened:
        return opened, {}


@pytest.fixture
def judge(options) -> Callable[..., list[str]]:
    """Messages about overrides. Choices of options are composed once, keys are set in a copy.

    Composing takes 0.2 s of CPU time; `test_rules_are_heard_when_composing` shows that nothing is lost.
    """
    opened, composed = options

    def messages(*words: str) -> list[str]:
        settled = opened.reader.settle(words)
        choices = tuple(settled.choices)
        if choices not in composed:
            composed[choices] = choose(opened.reader.loader, "rl", choices)
        config = copy.deepcopy(composed[choices])
        opened.set_keys(settled, config)
        tree = plain(config)
        try:
            check_tree("rl", settled, tree, True)
        except ConfigErrors as errors:
            return [str(problem) for problem in errors.problems]
        return []

    return messages
