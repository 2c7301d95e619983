"""Where a model's files are found."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prl.assets import bundled_model
from prl.config.training import ModelConfig
from prl.model_path import resolve_model_path


def put_model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def resolve(path: Path) -> Path:
    return resolve_model_path(ModelConfig(name="mine", path=str(path)))


def test_null_is_the_bundled_model_of_that_name() -> None:
    assert resolve_model_path(ModelConfig(name="tiny")) == bundled_model("tiny")
    with pytest.raises(ValueError, match="tiny"):
        resolve_model_path(ModelConfig(name="huge"))


def test_a_directory_is_itself(tmp_path: Path) -> None:
    model = put_model(tmp_path / "model")
    put_model(model / "weights")
    assert resolve(model) == model


def test_a_run_stands_for_its_weights_then_for_its_newest_exported_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step_20").mkdir(parents=True)
    put_model(tmp_path / "checkpoints" / "step_9" / "weights")
    newest = put_model(tmp_path / "checkpoints" / "step_10" / "weights")
    assert resolve(tmp_path) == newest
    weights = put_model(tmp_path / "weights")
    assert resolve(tmp_path) == weights


def test_an_empty_place_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    with pytest.raises(ValueError, match=r"holds: logs.*prl export"):
        resolve(tmp_path)
    with pytest.raises(ValueError, match="holds: nothing"):
        resolve(tmp_path / "absent")


def test_it_is_light() -> None:
    code = "import sys, prl.model_path; print({'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
