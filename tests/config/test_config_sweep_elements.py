"""What a sweep will run is known, and checked, before its sweeper decides."""

from __future__ import annotations

from pathlib import Path

import pytest

from prl.config.compose import open_options
from prl.config.errors import ConfigErrors
from prl.config.sweep_elements import MOST, _grid, elements


def found(*words: str, **kwargs) -> list[list[str]]:
    with open_options("rl", words, **kwargs) as options:
        listed, problems = elements(options)
    assert problems == []
    return listed


def sampling_sweeper() -> str:
    with open_options("rl", []) as options:
        if "optuna" not in options.reader.options("hydra/sweeper"):
            pytest.skip("no sampling sweeper is installed")
    return "hydra/sweeper=optuna"


def test_the_grid_of_the_basic_sweeper() -> None:
    assert found("optim.lr=1e-4,1e-3", "seed=range(1,3)", "loss=icepop") == [
        ["loss=icepop", f"optim.lr={lr}", f"seed={seed}"] for lr in ("0.0001", "0.001") for seed in (1, 2)
    ]


def configured(place: Path, params: str) -> Path:
    """A directory of options with the experiment `axes`, which sweeps over `params`."""
    (place / "experiment").mkdir()
    text = f"# @package _global_\n# rl: choose mine.\nhydra: {{sweeper: {{params: {params}}}}}\n"
    (place / "experiment" / "axes.yaml").write_text(text)
    return place


def seeds(listed: list[list[str]]) -> list[list[str]]:
    return [[word for word in words if word.startswith("seed")] for words in listed]


def test_axes_that_stand_in_a_configuration_are_seen(tmp_path: Path) -> None:
    options = [configured(tmp_path, "{seed: '1,2'}")]
    listed = found("experiment=axes", "zero=3", config_dirs=options)
    assert seeds(listed) == [["seed=1"], ["seed=2"]]
    assert all("zero='3'" in words for words in listed)
    assert seeds(found("experiment=axes", "seed=7", config_dirs=options)) == [["seed=7"]]


def test_a_configuration_cannot_name_the_runs_either(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match=r"run\.name = x: a sweep names its runs itself"):
        found("experiment=axes", config_dirs=[configured(tmp_path, "{run.name: x}")])


def test_a_sampling_sweeper_is_checked_at_every_choice_and_both_ends() -> None:
    sweeper = sampling_sweeper()
    listed = found(sweeper, "optim.lr=interval(1e-5,1e-3)", "algo=grpo,max_rl")
    ends = {word for words in listed for word in words if word.startswith("optim.lr=")}
    assert len(listed) == 4 and ends == {"optim.lr=1e-05", "optim.lr=0.001"}


def test_a_choice_that_does_not_exist_leaves_the_others_to_be_judged() -> None:
    with open_options("rl", ["algo=gpro,rae", "seed=1,2"]) as options:
        listed, problems = elements(options)
    assert [str(problem).split(";")[0] for problem in problems] == [
        "algo = gpro: no such option. Nearest: grpo"
    ]
    assert listed == [[f"algo={name}", f"seed={seed}"] for name in ("grpo", "rae") for seed in (1, 2)]


def test_large_grids_are_looked_at_value_by_value() -> None:
    axes = [[f"a={n}" for n in range(20)], [f"b={n}" for n in range(20)], ["c=1"]]
    listed = _grid(axes)
    assert len(listed) == 1 + 19 + 19 and len(listed) < MOST
    assert {word for words in listed for word in words} == {word for axis in axes for word in axis}
    assert len(_grid(axes[:1])) == 20


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["hydra/sweeper=nope"],
            "composition: In 'hydra/config': Could not find 'hydra/sweeper/nope' Available options",
        ),
        (
            ["optim.lr=interval(0,1)"],
            "--multirun: BasicSweeper does not support sweep type : INTERVAL_SWEEP.",
        ),
        (["output_dir=a,b"], "output_dir = a,b: a sweep names its runs itself"),
    ],
)
def test_what_cannot_be_swept_is_told(words: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        found(*words)
    assert str(caught.value.problems[0]).startswith(message)
