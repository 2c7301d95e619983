"""`prl export dry_run=true` says what would be written, refuses what cannot be, and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launchers.run_export import launch_export
from prl.checkpoint.export_source import ExportSource, output_directory
from prl.config.schema import ExportConfig
from prl.config.serving import ClusterConfig


def config(**fields: object) -> ExportConfig:
    return ExportConfig(run="outputs/mine", cluster=ClusterConfig(), dry_run=True, **fields)


@pytest.fixture
def located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExportSource:
    found = ExportSource(tmp_path / "checkpoints" / "step_3", tmp_path / "model")
    found.step_dir.mkdir(parents=True)
    monkeypatch.setattr("launchers.run_export.locate", lambda run, step: found)
    return found


def test_the_plan_names_source_and_target(located: ExportSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch_export(config(dtype="bfloat16"), "") == 0
    told = capsys.readouterr().out
    assert f"checkpoint  {located.step_dir}" in told and "dtype       bfloat16" in told
    assert f"directory   {located.step_dir / 'weights'}" in told and "nothing was written" in told
    assert list(located.step_dir.iterdir()) == []


def test_a_target_in_use_is_refused(located: ExportSource, capsys: pytest.CaptureFixture[str]) -> None:
    target = located.step_dir / "weights"
    target.mkdir()
    assert launch_export(config(), "") == 0, "an empty directory is no obstacle"
    (target / "model.safetensors").touch()
    assert launch_export(config(), "") == 2
    assert "exists and is not empty" in capsys.readouterr().err


def test_a_run_without_checkpoint_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = config()
    missing.run = str(tmp_path)
    assert launch_export(missing, "") == 2
    assert capsys.readouterr().err.startswith("export: ")


def test_out_is_absolute(located: ExportSource, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_directory("here", located) == tmp_path / "here"
    assert output_directory(None, located) == located.step_dir / "weights"


def test_a_plan_imports_nothing_heavy() -> None:
    code = "import launchers.run_export, sys; print({'torch', 'mlflow', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
