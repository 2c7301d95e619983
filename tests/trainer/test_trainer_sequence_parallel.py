"""Ranks that share rows compute what one rank computes of the whole rows, wherever the cuts fall."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_exact import KINDS, adamw64
from trainer_lab import (
    IPO,
    assert_equal,
    make_config,
    make_model,
    make_sequences,
    pack,
    reference_run,
    run_of_ranks,
    spawn,
)

from prl.config import training
from prl.records import MicroBatch
from prl.trainer.distributed import World, _world
from prl.trainer.engine import TrainEngine
from prl.trainer.sequence_parallel import SequenceGroup, check_sequence
from prl.trainer.step import train_step

STEPS = 3


def rows_of(sequences: list[MicroBatch]) -> list[MicroBatch]:
    return [pack(sequences[i:j]) for i, j in ((0, 3), (3, 7), (7, 8))]


@pytest.fixture(scope="module")
def steps() -> list[list[MicroBatch]]:
    return [make_sequences(seed, KINDS) for seed in range(STEPS)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, steps: Any) -> Path:
    """Two ranks, one group: both get every row."""
    rows = [[[asdict(row) for row in rows_of(sequences)]] for sequences in steps]
    plain = {"stage": 1, "recompute": "none", "first": 1, "save_after": 2, "rows": rows}
    cases = {
        "plain": plain,
        "resumed": {**plain, "first": 3},
        "sharded": {**plain, "stage": 3, "recompute": "full", "save_after": None},
    }
    out = tmp_path_factory.mktemp("shared")
    spawn(out, "sequence_worker.py", 2, {"model": str(model_dir), "sequence": 2, "cases": cases})
    return out


def test_the_rows_test_what_is_hard(steps: list[list[MicroBatch]]) -> None:
    """Documents across the cut, cuts between documents' first tokens, and rows that do not divide by two."""
    rows = [row for sequences in steps for row in rows_of(sequences)]
    cuts = [(list(accumulate(row.sequence_lengths)), -(-len(row) // 2)) for row in rows]
    assert sum(cut not in borders for borders, cut in cuts) > 3
    assert any(len(row) % 2 for row in rows) and any(len(row.sequence_lengths) > 3 for row in rows)


@pytest.mark.parametrize("case", ["plain", "sharded"])
def test_two_ranks_with_one_row_equal_the_reference(
    case: str, results: Path, model_dir: Path, steps: list[list[MicroBatch]]
) -> None:
    expected = reference_run(model_dir, steps, adamw64, max_norm=1.0)
    assert_equal(run_of_ranks(results, case), expected, norm_error=1e-4)


def test_a_shared_row_is_counted_once(
    results: Path, model_dir: Path, world: World, steps: list[list[MicroBatch]]
) -> None:
    optim = training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01)
    engine = TrainEngine(make_config(model_dir, optim), world, None)
    alone = train_step(engine, rows_of(steps[0]), IPO, 1)
    engine.close()
    shared = json.loads((results / "plain.json").read_text())[0]
    timed = ("perf/", "time/")
    assert shared.keys() - {"perf/mfu"} == alone.keys() - {"perf/mfu"}
    for name in alone:
        if not name.startswith(timed):
            assert shared[name] == pytest.approx(alone[name], rel=1e-3, abs=1e-6), name
    seconds = shared["time/load_data"] + shared["time/forward_backward"]
    tokens = sum(len(row) for row in rows_of(steps[0]))
    assert shared["perf/throughput"] * seconds == pytest.approx(tokens)


def test_a_checkpoint_of_ranks_that_share_rows_resumes(results: Path) -> None:
    whole, resumed = (load_file(results / f"{name}.safetensors") for name in ("plain", "resumed"))
    assert all(torch.equal(resumed[name], tensor) for name, tensor in whole.items())


def test_parts_of_a_row_are_of_one_length() -> None:
    row = torch.arange(7)
    parts = [SequenceGroup(None, rank, 3).part(row, 9) for rank in range(3)]
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4, 5], [6, 9, 9]]


def test_ranks_are_grouped_with_their_neighbours() -> None:
    device = torch.device("cpu")
    worlds = [_world(rank, 4, device, sequence=2) for rank in range(4)]
    assert [w.data_rank for w in worlds] == [0, 0, 1, 1] and {w.data_size for w in worlds} == {2}
    assert [w.leads for w in worlds] == [True, False, True, False]
    with pytest.raises(ValueError, match="3 ranks are not a multiple"):
        _world(0, 3, device, sequence=2)


def test_heads_and_kernels_that_cannot_be_shared_are_refused(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(make_model(tmp_path / "model"))
    config._attn_implementation = "prl_packed"
    check_sequence(config, 2)
    with pytest.raises(ValueError, match="num_key_value_heads = 2 is not a multiple"):
        check_sequence(config, 4)
    config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match="packed attention"):
        check_sequence(config, 2)
