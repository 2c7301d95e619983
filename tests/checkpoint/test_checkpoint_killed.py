"""A trainer that is killed in the middle of a save leaves the checkpoint before it as the latest."""

from __future__ import annotations

import pytest
from checkpoint_ranks import spawn

from prl.checkpoint.marker import mark_complete, step_dir
from prl.checkpoint.resolve import latest
from prl.checkpoint.retention import complete_steps, prune, set_aside
from prl.checkpoint.save import publish


@pytest.mark.parametrize(("at", "world"), [("dcp", 2), ("publish", 1), ("async", 1)])
def test_the_previous_checkpoint_is_chosen(tmp_path, at, world):
    """The last rank dies before it writes its weights, when all is written but has not its name yet, or while
    it trains on and a thread has written the weights and nothing else."""
    before, killed = step_dir(tmp_path, 5), step_dir(tmp_path, 10)
    (before / "trainer").mkdir(parents=True)
    (before / "trainer" / "weights").write_text("some")
    mark_complete(before, ["trainer"])
    phase = {"do": "killed", "at": at, "zero": {"stage": 2}, "path": str(killed / "trainer")}
    spawn(world, [phase], tmp_path / "ranks", dies=True)

    half = killed / ".trainer.tmp"
    assert half.is_dir() and (half / "trainer_state.json").exists() == (at == "publish")
    assert not (killed / "trainer").exists()
    assert complete_steps(tmp_path) == [5] and latest(tmp_path) == before
    with pytest.raises(ValueError, match="step 10 is complete"):
        prune(tmp_path, 10, keep_last=1, keep_interval=None)
    assert set_aside(tmp_path, after=5) == [10]
    assert not killed.exists()


def test_a_part_that_is_replaced_makes_its_step_incomplete(tmp_path):
    directory = step_dir(tmp_path, 2)
    for name in ("trainer", ".trainer.tmp"):
        (directory / name).mkdir(parents=True)
        (directory / name / "file").write_text(name)
    mark_complete(directory, ["trainer"])
    publish(directory / ".trainer.tmp", directory / "trainer")
    assert complete_steps(tmp_path) == []
    assert (directory / "trainer" / "file").read_text() == ".trainer.tmp"
    assert [path.name for path in directory.iterdir()] == ["trainer"]
