from __future__ import annotations

from pathlib import Path

from prl.checkpoint.export import run_of


def test_the_run_of_an_export_is_the_one_that_was_named_or_holds_the_checkpoint(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step_3"
    step.mkdir(parents=True)
    assert run_of(str(step), step) == tmp_path / "run"
    elsewhere = tmp_path / "big" / "step_3"
    (tmp_path / "run" / "configs").mkdir()
    assert run_of(str(tmp_path / "run"), elsewhere) == tmp_path / "run", "its checkpoints lie elsewhere"
