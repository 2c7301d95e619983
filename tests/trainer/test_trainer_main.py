"""The loop of a role: what is published, saved and logged, in which order, and where it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trainer_lab import make_config, make_sequences, pack

from prl.checkpoint.marker import is_complete
from prl.checkpoint.resolve import checkpoints_dir
from prl.checkpoint.retention import complete_steps
from prl.config import training
from prl.config.schema import RlConfig
from prl.records import MicroBatch
from prl.run_dir import RunDir
from prl.sync.filesystem import newest_version, read_version
from prl.trainer import checkpoints, main
from prl.trainer.distributed import World

ADAMW = training.AdamWConfig(lr=1e-2)
LINEAR = training.LinearConfig(warmup_steps=0, decay_steps=4, min_lr=1e-3)


class Batches:
    """Stands for the orchestrator: rows by step, its part of a checkpoint when asked for the step after."""

    asked: list[int]
    run: RunDir

    def __init__(self, address: str, rank: int, world: int) -> None:
        assert (address, rank, world) == ("tcp://127.0.0.1:1", 0, 1)

    def receive(self, step: int, timeout: float) -> list[MicroBatch]:
        newest = newest_version(self.run.broadcasts)
        assert newest is not None and newest.version == step - 1, "weights come before the wait for a batch"
        self.asked.append(step)
        part = self.run.checkpoints / f"step_{step}" / "orchestrator" / "state.json"
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text("{}")
        sequences = make_sequences(step, ["rl", "ce", "rl"])
        return [pack(sequences[:2]), sequences[2]]

    def close(self) -> None:
        pass


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: World) -> RunDir:
    made = RunDir(tmp_path / "run")
    made.publish_address("orchestrator", "tcp://127.0.0.1:1")
    monkeypatch.setattr(Batches, "asked", [], raising=False)
    monkeypatch.setattr(Batches, "run", made, raising=False)
    monkeypatch.setattr(main, "open_receiver", Batches)
    return made


def config(model_dir: Path, max_steps: int, **fields: Any) -> RlConfig:
    scheduler = LINEAR if max_steps >= 4 else training.SchedulerConfig()
    made = make_config(model_dir, ADAMW, scheduler=scheduler, zero=training.ZeroConfig(stage=1), **fields)
    made.max_steps = max_steps
    return made


def weights(run: RunDir, version: int) -> dict[str, torch.Tensor]:
    directory = Path(read_version(run.broadcasts, version).path)
    return {name: t for file in directory.glob("*.safetensors") for name, t in load_file(file).items()}


def rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metric_file("trainer").read_text().splitlines()]


def test_weights_come_before_the_wait_for_the_orchestrator(
    run: RunDir, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for engines, and engines wait for weights."""
    seen = []
    wait = RunDir.wait_for_address_blocking

    def spy(self: RunDir, role: str, timeout: float) -> str:
        seen.append(newest_version(self.broadcasts))
        return wait(self, role, timeout)

    monkeypatch.setattr(RunDir, "wait_for_address_blocking", spy)
    main.main(config(model_dir, 1), run, "trainer/0")
    assert [found.version for found in seen] == [0]


def test_every_version_is_published_and_every_step_logged(run: RunDir, model_dir: Path) -> None:
    made = config(model_dir, 4)
    made.sync.keep = 10
    main.main(made, run, "trainer/0")
    assert Batches.asked == [1, 2, 3, 4]
    assert [read_version(run.broadcasts, v).version for v in range(5)] == [0, 1, 2, 3, 4]
    stored = load_file(model_dir / "model.safetensors")
    first, last = weights(run, 0), weights(run, 4)
    assert all(torch.equal(first[name], tensor) for name, tensor in stored.items())
    assert not torch.equal(first["model.norm.weight"], last["model.norm.weight"])
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4]
    for key in ("time/step", "time/wait_for_batch", "time/broadcast_weights", "optim/lr", "entropy/all/mean"):
        assert all(key in row for row in rows(run)), key
    assert "time/save_ckpt" not in rows(run)[0]


def test_resume_continues_exactly_where_the_checkpoint_is(run: RunDir, model_dir: Path) -> None:
    main.main(config(model_dir, 4, ckpt=training.CkptConfig(interval=2)), run, "trainer/0")
    assert complete_steps(run.checkpoints) == [2, 4]
    straight = weights(run, 4)
    lrs = [row["optim/lr"] for row in rows(run)]
    resumed = config(model_dir, 4)
    resumed.run.resume = str(run.checkpoints / "step_2")
    main.main(resumed, run, "trainer/0")
    assert Batches.asked == [1, 2, 3, 4, 3, 4]
    again = weights(run, 4)
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.items())
    assert [row["optim/lr"] for row in rows(run)][4:] == lrs[2:]


def test_a_skipped_schedule_starts_anew(run: RunDir, model_dir: Path) -> None:
    main.main(config(model_dir, 4, ckpt=training.CkptConfig(interval=2)), run, "trainer/0")
    resumed = config(model_dir, 6, ckpt=training.CkptConfig(interval=4, skip_scheduler=True))
    resumed.scheduler = training.LinearConfig(warmup_steps=2, decay_steps=2, min_lr=1e-3)
    resumed.run.resume = str(run.checkpoints / "step_2")
    main.main(resumed, run, "trainer/0")
    assert [row["optim/lr"] for row in rows(run)][4:] == pytest.approx([1e-3, 5.5e-3, 1e-2, 1e-3])
    state = json.loads((run.checkpoints / "step_4" / "trainer" / "trainer_state.json").read_text())
    assert state["extra"] == {"step": 4, "schedule_start": 2}


def test_the_final_checkpoint_and_retention(run: RunDir, model_dir: Path) -> None:
    ckpt = training.CkptConfig(interval=1, at_end=True, keep_last=1)
    main.main(config(model_dir, 3, ckpt=ckpt), run, "trainer/0")
    assert complete_steps(run.checkpoints) == [3]
    assert is_complete(run.checkpoints / "step_3") and "time/save_ckpt" in rows(run)[0]


def test_resuming_at_or_past_the_end_asks_for_nothing(run: RunDir, model_dir: Path) -> None:
    for step in (4, 7):
        done = config(model_dir, 4)
        done.run.resume = str(run.checkpoints / f"step_{step}")
        main.main(done, run, "trainer/0")
    assert Batches.asked == [] and not run.broadcasts.exists()


def test_without_the_orchestrators_part_a_checkpoint_never_completes(
    run: RunDir, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "ORCHESTRATOR_STATE", Path("orchestrator") / "absent.json")
    made = config(model_dir, 1, ckpt=training.CkptConfig(at_end=True))
    made.sync.timeout = 0.2
    with pytest.raises(TimeoutError, match=r"absent\.json within 0 s"):
        main.main(made, run, "trainer/0")
    assert complete_steps(run.checkpoints) == []
    assert (run.checkpoints / "step_1" / "trainer").is_dir()


@pytest.mark.parametrize(
    ("ckpt", "due"),
    [
        (training.CkptConfig(), []),
        (training.CkptConfig(at_end=True), [6]),
        (training.CkptConfig(interval=4), [4]),
        (training.CkptConfig(interval=3, at_end=True), [3, 6]),
    ],
)
def test_when_a_checkpoint_is_due(ckpt: training.CkptConfig, due: list[int]) -> None:
    assert [step for step in range(1, 7) if checkpoints.is_due(ckpt, step, max_steps=6)] == due


def test_a_directory_of_its_own_for_checkpoints(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert checkpoints_dir(training.CkptConfig(), run) == tmp_path / "checkpoints"
    elsewhere = training.CkptConfig(dir="/elsewhere")
    assert checkpoints_dir(elsewhere, run) == Path("/elsewhere")
