"""`model.path=<a run>`: which weights it stands for, and how a checkpoint becomes a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from sft_lab import sft_config

from launchers import initial_model
from launchers.initial_model import settle_initial_model
from prl.checkpoint.marker import mark_complete
from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.load import dump_resolved
from prl.config.training import CkptConfig, ModelConfig
from prl.model_path import EXPORTED_STEP, newer_checkpoint, resolve_model_path
from prl.run_dir import RunDir
from prl.sft.main import main
from prl.trainer.distributed import World


def checkpoint(run: Path, step: int, complete: bool = True) -> Path:
    directory = run / "checkpoints" / f"step_{step}"
    (directory / "trainer").mkdir(parents=True)
    (directory / "trainer" / "x").write_text("x")
    if complete:
        mark_complete(directory, ["trainer"])
    return directory


def put_model(directory: Path, step: int | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text("{}")
    if step is not None:
        (directory / EXPORTED_STEP).write_text(json.dumps({"step": step}))
    return directory


def model(path: Path) -> ModelConfig:
    return ModelConfig(name="tiny", path=str(path))


def test_a_run_stands_for_its_newest_complete_checkpoint(tmp_path: Path) -> None:
    assert newer_checkpoint(model(tmp_path)) is None
    checkpoint(tmp_path, 9)
    tenth = checkpoint(tmp_path, 10)
    checkpoint(tmp_path, 11, complete=False)
    assert newer_checkpoint(model(tmp_path)) == tenth
    assert newer_checkpoint(model(tenth)) == tenth
    assert newer_checkpoint(ModelConfig(name="tiny")) is None


def test_exported_weights_count_unless_a_checkpoint_is_newer(tmp_path: Path) -> None:
    tenth = checkpoint(tmp_path, 10)
    old = put_model(tmp_path / "weights", step=9)
    assert newer_checkpoint(model(tmp_path)) == tenth
    assert resolve_model_path(model(tmp_path)) == old
    new = put_model(tenth / "weights")
    assert newer_checkpoint(model(tmp_path)) is None and resolve_model_path(model(tmp_path)) == new
    put_model(tmp_path / "weights", step=12)
    assert resolve_model_path(model(tmp_path)) == old
    (old / EXPORTED_STEP).unlink()
    assert resolve_model_path(model(tmp_path)) == old, "weights put there by hand count as the newest"


def test_such_a_run_is_accepted_where_it_will_be_exported_and_nowhere_else(tmp_path: Path) -> None:
    checkpoint(tmp_path, 3)
    for command in ("rl", "sft"):
        assert compose_job(command, [f"model.path={tmp_path}"]).model.path == str(tmp_path)
    with pytest.raises(ConfigErrors, match="no model there"):
        compose_job("eval", [f"model.path={tmp_path}"])


def test_a_checkpoint_becomes_the_initial_model_once(
    tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first = RunDir(tmp_path / "first")
    made = sft_config(2, ckpt=CkptConfig(at_end=True))
    made.output_dir, made.run.name = str(tmp_path), "first"
    main(made, first, "sft/0")
    first.resolved_config.parent.mkdir(parents=True, exist_ok=True)
    first.resolved_config.write_text(dump_resolved("sft", made))
    second = RunDir(tmp_path / "second")
    second.path.mkdir()
    config = sft_config(1, model=ModelConfig(name="tiny", path=str(first.path)))
    settle_initial_model(config, second)
    assert config.model.path == str(second.path / "initial_model")
    assert resolve_model_path(config.model) == second.path / "initial_model"
    assert AutoModelForCausalLM.from_pretrained(config.model.path).num_parameters() == 191_808
    assert AutoTokenizer.from_pretrained(config.model.path).chat_template
    assert sorted(path.name for path in first.path.iterdir()) == ["checkpoints", "configs", "metrics"]
    monkeypatch.setattr(initial_model, "EXPORT", "raise SystemExit('not again')")
    again = sft_config(1, model=ModelConfig(name="tiny", path=str(first.path)))
    settle_initial_model(again, second)
    assert again.model.path == config.model.path
    plain = SimpleNamespace(model=ModelConfig(name="tiny"))
    settle_initial_model(plain, second)
    assert plain.model.path is None


def test_a_checkpoint_that_cannot_be_exported_is_told(tmp_path: Path) -> None:
    checkpoint(tmp_path / "broken", 3)
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with pytest.raises(ValueError, match=r"model\.path = .*broken: .*step_3 cannot be exported: export: "):
        settle_initial_model(SimpleNamespace(model=model(tmp_path / "broken")), run)
    assert not list(run.path.iterdir())
