"""Losses against an unpacked float64 loop; resumes that equal the uninterrupted run, on one and two ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sft_lab import exact, logged, reference_nll, run_ranks, sft_config

from prl.assets import bundled_model
from prl.config import training
from prl.config.sft import RowsDataConfig, ValConfig
from prl.run_dir import RunDir
from prl.sft.documents import build_documents
from prl.sft.main import main
from prl.trainer.distributed import World

TINY = training.ModelConfig(name="tiny")


def rows(**fields: Any) -> RowsDataConfig:
    settings = {"name": "reverse_text", "path": "bundled:reverse_text", "batch_size": 4, "workers": 0}
    return RowsDataConfig(**{**settings, **fields})


def test_first_loss_and_validation_equal_the_float64_reference(tmp_path: Path, world: World) -> None:
    held_out = rows(splits=["test"])
    made = sft_config(1, val=ValConfig(data=held_out, at_start=True))
    run = RunDir(tmp_path)
    main(made, run, "sft/0")
    before, first = logged(run)
    data = build_documents(made.data, TINY, 64, 0)
    trained = [data.document(i) for i in range(first["progress/num_samples"])]
    total, learned = reference_nll(bundled_model("tiny"), [(d.token_ids, d.mask) for d in trained])
    assert first["loss/mean"] == pytest.approx(total / learned, abs=1e-6)
    assert first["progress/num_learned_tokens"] == learned
    assert first["progress/num_tokens"] == sum(len(d.token_ids) for d in trained)
    validated = build_documents(held_out, TINY, 64, 0)
    documents = [validated.document(i) for i in range(200)]
    total, learned = reference_nll(bundled_model("tiny"), [(d.token_ids, d.mask) for d in documents])
    assert before["step"] == 0 and before["val/num_tokens"] == learned
    assert before["val/loss"] == pytest.approx(total / learned, abs=1e-6)
    assert before["val/perplexity"] == pytest.approx(np.exp(total / learned), rel=1e-5)
    assert first["val/loss"] < before["val/loss"], "after the last step it is validated again"


@pytest.mark.parametrize(("packing", "micro"), [("stack", 2), ("fit", 1), ("cat", 2)])
def test_every_packing_has_the_loss_of_its_documents(
    packing: str, micro: int, tmp_path: Path, world: World
) -> None:
    made = sft_config(1, rows(packing=packing, micro_batch_size=micro, batch_size=8))
    seen = watch_rows(tmp_path, lambda: main(made, RunDir(tmp_path / "run"), "sft/0"))
    data = build_documents(made.data, TINY, 64, 0)
    by_name = {d.name: d for d in map(data.document, range(200))}
    trained = [by_name[name] for _, step in seen for name in step]
    total, learned = reference_nll(bundled_model("tiny"), [(d.token_ids, d.mask) for d in trained])
    assert logged(RunDir(tmp_path / "run"))[0]["loss/mean"] == pytest.approx(total / learned, abs=1e-6)


def watch_rows(folder: Path, work: Any) -> list[list[Any]]:
    """(step, ids of its rows) of the runs that `work` makes."""
    import sft_ranks

    from prl.sft import main as sft

    original = sft.train_step
    sft_ranks.record_rows(folder, 0)
    try:
        work()
    finally:
        sft.train_step = original
    return [json.loads(line) for line in (folder / "rows-0.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_resumed_run_equals_the_uninterrupted_one(workers: int, tmp_path: Path, world: World) -> None:
    """Row ids, learning rates, counters, losses and random states, with any number of workers."""
    ckpt = training.CkptConfig(interval=2)
    whole, rest = RunDir(tmp_path / "whole"), RunDir(tmp_path / "rest")
    made = sft_config(6, ckpt=ckpt)
    straight = watch_rows(tmp_path / "a", lambda: main(made, whole, "sft/0"))
    torch.manual_seed(99), random.seed(99), np.random.seed(99)
    resumed = sft_config(6, rows(workers=workers), ckpt=ckpt)
    resumed.run.resume = str(whole.checkpoints / "step_2")
    joined = watch_rows(tmp_path / "b", lambda: main(resumed, rest, "sft/0"))
    assert joined == straight[2:] and [step for step, _ in joined] == [3, 4, 5, 6]
    assert exact(logged(rest)) == exact(logged(whole))[2:]
    assert len({row[2] for row in exact(logged(whole))}) > 3, "the learning rate moves"
    states = [
        (run.checkpoints / "step_6" / "trainer" / "rng" / "rank_0.json").read_text() for run in (whole, rest)
    ]
    assert states[0] == states[1]
    places = [
        json.loads((run.checkpoints / "step_6" / "trainer" / "trainer_state.json").read_text())["extra"]
        for run in (whole, rest)
    ]
    assert places[0] == places[1] and places[0]["data"][0]["counters"]["samples"] > 30


def test_two_ranks_resume_bitwise_and_change_their_number_without_losing_a_row(tmp_path: Path) -> None:
    ckpt = training.CkptConfig(interval=2)
    runs = {name: tmp_path / name for name in ("whole", "rest")}
    resumed = sft_config(6, ckpt=ckpt)
    resumed.run.resume = str(runs["whole"] / "checkpoints" / "step_2")
    jobs = [("whole", sft_config(6, ckpt=ckpt), runs["whole"]), ("rest", resumed, runs["rest"])]
    run_ranks(jobs, 2, tmp_path / "jobs")
    assert exact(logged(RunDir(runs["rest"]))) == exact(logged(RunDir(runs["whole"])))[2:]
    ids = {
        (name, rank): [
            json.loads(line) for line in (runs[name] / f"rows-{rank}.jsonl").read_text().splitlines()
        ]
        for name in runs
        for rank in range(2)
    }
    for rank in range(2):
        assert ids["rest", rank] == ids["whole", rank][2:]
        texts = [
            (runs[name] / "checkpoints" / "step_6" / "trainer" / "rng" / f"rank_{rank}.json").read_text()
            for name in runs
        ]
        assert texts[0] == texts[1]
    alone = sft_config(8, ckpt=training.CkptConfig())
    alone.run.resume = str(runs["whole"] / "checkpoints" / "step_6")
    later = tmp_path / "alone"
    run_ranks([("alone", alone, later)], 1, tmp_path / "jobs1")
    before = [name for rank in range(2) for _, step in ids["whole", rank] for name in step]
    after = [
        name for line in (later / "rows-0.jsonl").read_text().splitlines() for name in json.loads(line)[1]
    ]
    assert len(set(before + after)) == len(before) + len(after), "no row twice in the first epoch"
    data = build_documents(sft_config(1).data, TINY, 64, 0)
    first = [data.document(i).name for i in range(len(before))]
    assert set(first) <= set(before + after), "no row left out"
    counts = logged(RunDir(later))
    assert counts[-1]["progress/num_samples"] == len(before) + len(after)
