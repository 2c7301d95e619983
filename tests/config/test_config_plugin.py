"""A user's own package and options: no file of prl is touched."""

from __future__ import annotations

from pathlib import Path

import pytest

from prl.config.algo import AlgoConfig
from prl.config.compose import compose_job
from prl.config.load import dump_resolved, load_resolved


@pytest.fixture
def options(tmp_path: Path) -> Path:
    """A directory of options such as a user keeps beside prl."""
    files = {
        "algo/mine.yaml": "# Choose it.\nname: mine\nimport_path: my_package.algo:Mine\nkwargs: {power: 2}\n",
        "env/words.yaml": "# @package env.words\n# Choose words.\nid: my_words\ntaskset: {length: 3}\n",
        "model/other.yaml": "# Choose other.\nname: tiny\nnum_layers: 1\n",
        "experiment/big.yaml": (
            "# @package _global_\n# rl: choose big.\ndefaults:\n  - override /algo: mine\n"
            "  - override /env: [words, reverse_text]\noptim: { lr: 5e-4 }\n"
        ),
        "own.yaml": "# Own.\ndefaults: [rl, {override algo: mine}, _self_]\nmax_steps: 7\n",
    }
    for name, text in files.items():
        path = tmp_path / "options" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "options"


def test_an_algorithm_of_ones_own(options: Path, tmp_path: Path) -> None:
    config = compose_job("rl", ["algo=mine", "+algo.kwargs.depth=3"], [options])
    mine = AlgoConfig("mine", "my_package.algo:Mine", {"power": 2, "depth": 3})
    assert config.algo == mine
    (tmp_path / "resolved.yaml").write_text(dump_resolved("rl", config))
    assert load_resolved(tmp_path / "resolved.yaml")[1].algo == mine


def test_its_settings_are_checked_as_far_as_they_are_known(options: Path, refused) -> None:
    (message,) = refused("algo=mine", "algo.power=3", config_dirs=[options])
    assert message == "algo.power = 3: unknown key of algo=mine. Valid: name, import_path, kwargs."
    (message,) = refused("algo=mine", "algo.import_path=nothing", config_dirs=[options])
    assert "not an import path" in message
    (message,) = refused("algo=mien", config_dirs=[options])
    assert "Nearest: mine;" in message


def test_an_algorithm_without_code_is_refused(options: Path, refused) -> None:
    (options / "algo" / "empty.yaml").write_text("# Choose empty.\nname: empty\n")
    (message,) = refused("algo=empty", config_dirs=[options])
    assert "algo.name = empty: no such option." in message and "also needs `import_path`" in message


def test_environments_models_and_experiments_of_ones_own(options: Path) -> None:
    config = compose_job("rl", ["experiment=big", "model=other", "env.words.ratio=2"], [options])
    assert list(config.env) == ["words", "reverse_text"]
    assert (config.env["words"].id, config.env["words"].taskset) == ("my_words", {"length": 3})
    assert (config.env["words"].ratio, config.env["words"].workers) == (2.0, 1)
    assert (config.model.num_layers, config.algo.name, config.optim.lr) == (1, "mine", 5e-4)


def test_the_recipe_of_the_tiny_model_stays_with_it(options: Path) -> None:
    config = compose_job("rl", ["model=other"], [options])
    assert (config.rollout.group_size, config.rollout.sampling.max_tokens) == (8, None)
    assert config.optim.lr == 1e-6


def test_a_primary_config_of_ones_own(options: Path) -> None:
    config = compose_job("rl", ["seed=3"], [options], "own")
    assert (config.max_steps, config.algo.name, config.seed) == (7, "mine", 3)


@pytest.mark.parametrize("form", ["[file://{}]", "['file://{}']"])
def test_the_search_path_of_hydra_serves_as_well(options: Path, form: str) -> None:
    config = compose_job("rl", ["algo=mine", "hydra.searchpath=" + form.format(options)])
    assert config.algo.name == "mine"


def test_two_directories(options: Path, tmp_path: Path) -> None:
    (tmp_path / "more" / "loss").mkdir(parents=True)
    (tmp_path / "more" / "loss" / "mild.yaml").write_text(
        "# Choose mild.\ndefaults: [ipo, _self_]\neps: 0.5\n"
    )
    config = compose_job("rl", ["algo=mine", "loss=mild"], [options, tmp_path / "more"])
    assert (config.algo.name, config.loss.name, config.loss.eps) == ("mine", "ipo", 0.5)
