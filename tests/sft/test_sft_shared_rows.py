"""Two ranks that share each row of a supervised run: the losses, counters and resumes of one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sft_lab import exact, logged, run_ranks, sft_config

from prl.config import training
from prl.config.schema import SftConfig
from prl.config.sft import RowsDataConfig, ValConfig
from prl.run_dir import RunDir
from prl.sft.main import main
from prl.trainer.distributed import World

SHARED = ("loss/mean", "optim/grad_norm", "progress/num_samples", "progress/num_tokens", "val/loss")


def config(sequence: int) -> SftConfig:
    held_out = RowsDataConfig(
        name="reverse_text", path="bundled:reverse_text", workers=0, splits=["test"], micro_batch_size=4
    )
    return sft_config(
        4,
        ckpt=training.CkptConfig(interval=2),
        val=ValConfig(data=held_out),
        trainer=training.TrainerConfig(seq_len=64, sequence_parallel=sequence),
    )


def test_two_ranks_that_share_rows_equal_one(tmp_path: Path, world: World) -> None:
    main(config(1), RunDir(tmp_path / "alone"), "sft/0")
    resumed = config(2)
    resumed.run.resume = str(tmp_path / "shared" / "checkpoints" / "step_2")
    jobs = [("shared", config(2), tmp_path / "shared"), ("rest", resumed, tmp_path / "rest")]
    run_ranks(jobs, 2, tmp_path / "jobs")
    alone, shared, rest = (logged(RunDir(tmp_path / name)) for name in ("alone", "shared", "rest"))
    assert len(shared) == len(alone) == 4
    for mine, expected in zip(shared, alone, strict=True):
        for name in SHARED:
            if name in expected:
                assert mine[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (mine["step"], name)
    assert "val/loss" in shared[-1] and shared[-1]["val/num_tokens"] == alone[-1]["val/num_tokens"]
    assert exact(rest) == exact(shared)[2:]
    rows = [(tmp_path / "shared" / f"rows-{rank}.jsonl").read_text() for rank in range(2)]
    assert rows[0] == rows[1] and len(json.loads(rows[0].splitlines()[0])[1]) > 3
