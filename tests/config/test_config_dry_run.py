"""A dry run tells everything and changes nothing, not even a time stamp."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from prl.__main__ import main as prl
from prl.checkpoint.marker import mark_complete


def checksum(root: Path) -> str:
    """Of every path below `root` with its type, size, times and content."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        facts = path.lstat()
        told = (str(path.relative_to(root)), facts.st_mode, facts.st_size, facts.st_mtime_ns)
        digest.update(repr(told).encode())
        if path.is_symlink():
            digest.update(str(path.readlink()).encode())
        elif path.is_file():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def a_run(place: Path) -> None:
    """What an earlier run left, stale weights included."""
    run = place / "outputs" / "old"
    for name in ("configs/attempt_1", "logs/attempt_1", "broadcasts/step_3", "checkpoints/step_2"):
        (run / name).mkdir(parents=True)
    (run / "logs" / "latest").symlink_to("attempt_1")
    (run / "configs" / "attempt_1" / "resolved.yaml").write_text("command: rl\n")
    for part in ("trainer", "orchestrator"):
        (run / "checkpoints" / "step_2" / part).mkdir()
        (run / "checkpoints" / "step_2" / part / "state.json").write_text("{}")
    mark_complete(run / "checkpoints" / "step_2")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["dry_run=true"], 0),
        (["--dry-run", "run.name=new", "ckpt=end", "zero=3", "cluster.train_ranks=2"], 0),
        (["--dry-run", "run.name=old", "run.clean=true"], 0),
        (["--dry-run", "run.name=old"], 2),
        (["--dry-run", "run.name=old", "run.resume=latest"], 0),
        (["sft", "--dry-run"], 0),
        (["eval", "reverse_text", "-n", "4", "--dry-run"], 0),
        (["inference", "--dry-run"], 0),
        (["--multirun", "--dry-run", "seed=1,2"], 0),
        (["--dry-run", "algo=gpro"], 2),
        (["--cfg", "job"], 0),
        (["--help"], 0),
    ],
)
def test_the_tree_is_the_same_before_and_after(
    clean_place: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int
) -> None:
    a_run(clean_place)
    before = checksum(clean_place)
    assert prl(words) == code, capsys.readouterr().err
    assert checksum(clean_place) == before


def test_a_dry_run_tells_everything(clean_place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert prl(["--dry-run", "run.name=mine", "algo=opd", "loss=ppo", "env_vars.all.MARK=1"]) == 0
    text = capsys.readouterr().out
    for part in (
        "--- resolved config of every process\ncommand: rl\n",
        "name: mine",
        "ref_kl by ppo",
        f"directory    {clean_place / 'outputs' / 'mine'}",
        "--- placement\nrole ",
        "teacher/shared ",
        "orchestrator ",
        "MARK=1",
        "--- memory\nestimate, MB",
        "dry run: nothing was started, nothing was written",
    ):
        assert part in text, part


def test_a_dry_run_under_slurm_shows_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert prl(["--dry-run", "cluster=slurm"]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH" in text and "estimate, MB" in text
