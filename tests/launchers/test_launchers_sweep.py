from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launchers.sweep import SWEEP_VAR, sweep_directory, task_overrides

APP = """
import hydra
from launchers.sweep import sweep_directory, task_overrides

@hydra.main(version_base="1.3", config_path=None)
def app(config):
    print(sweep_directory({}), task_overrides(["prl", "--multirun", "+a=1,2"]))

app()
"""


def test_a_single_run_is_no_sweep() -> None:
    assert sweep_directory({}) is None
    assert task_overrides(["python", "-m", "prl", "sft", "optim.lr=1"]) == ["optim.lr=1"]


def test_a_sweep_of_separate_processes_is_named_by_the_environment(tmp_path: Path) -> None:
    assert sweep_directory({SWEEP_VAR: str(tmp_path)}) == tmp_path


@pytest.mark.parametrize("flags", [["--multirun", "+a=1,2"], ["+a=1"]])
def test_an_element_of_a_hydra_sweep_knows_its_sweep_and_its_own_overrides(
    flags: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "app.py"
    script.write_text(APP)
    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled", "hydra.output_subdir=null"]
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, str(script), *flags, "hydra.sweep.dir=sweep", "hydra.run.dir=.", *quiet],
        cwd=tmp_path,
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    if "--multirun" in flags:
        assert told == [f"{tmp_path}/sweep ['+a=1']", f"{tmp_path}/sweep ['+a=2']"]
    else:
        assert told == ["None ['+a=1,2']"]
