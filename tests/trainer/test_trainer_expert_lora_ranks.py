"""Adapters of experts on two ranks: the float64 loop's steps, although a rank's tokens miss some experts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_expert_lora import PARTS, STEPS, engine_of, low_rank, reference
from trainer_lab import pack, spawn

from prl.config import training
from prl.trainer.distributed import World

LORA = {"rank": 3, "alpha": 6.0, "targets": ["experts"]}


def ranks_of(sequences: list[Any]) -> list[list[dict[str, Any]]]:
    """One row on rank 0, two on rank 1, one of them of a single short sequence."""
    parts = [[pack(sequences[:2])], [pack(sequences[2:4]), pack(sequences[4:])]]
    return [[asdict(row) for row in part] for part in parts]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, moe_dir: Path) -> Path:
    rows = [ranks_of(sequences) for sequences in STEPS]
    common = {"dtype": "float32", "optim": "lora", "rows": rows, "lora": LORA}
    cases = {f"stage{stage}": {**common, "stage": stage} for stage in range(4)}
    cases["hpz"] = {**common, "stage": 3, "hpz": 2, "recompute": "selective"}
    both = {"rank": 2, "targets": ["q_proj", "experts"], "dropout": 0.0}
    for stage in (1, 3):
        cases[f"muon{stage}"] = {**common, "stage": stage, "optim": "muon", "lora": both}
    out = tmp_path_factory.mktemp("expert_ranks")
    spawn(out, "zero_worker.py", 2, {"model": str(moe_dir), "world": 2, "cases": cases})
    return out


@pytest.fixture(scope="module")
def expected(moe_dir: Path, world: World) -> dict[str, Any]:
    """A and B are drawn from the seed: one rank begins with the same."""
    engine = engine_of(moe_dir, world, training.LoraConfig(**LORA))
    initial = low_rank(engine)
    engine.close()
    return reference(moe_dir, initial, STEPS)


@pytest.mark.parametrize("case", ["stage0", "stage1", "stage2", "stage3", "hpz"])
def test_two_ranks_equal_the_reference(
    case: str, results: Path, expected: dict[str, Any], moe_dir: Path
) -> None:
    metrics = json.loads((results / f"{case}.json").read_text())
    assert [m["loss/mean"] for m in metrics] == pytest.approx(expected["losses"], abs=1e-5)
    assert [m["optim/grad_norm"] for m in metrics] == pytest.approx(expected["norms"], rel=1e-4)
    weights = load_file(results / f"{case}.safetensors")
    for name, stack in expected["weights"].items():
        path, kind = name.rsplit(".", 1)
        for n, matrix in enumerate(stack):
            published = torch.cat([weights[f"{path}.{n}.{part}.weight"] for part in PARTS[kind]])
            assert (published - matrix).abs().max() < 2e-4, (name, n)
    stored = load_file(moe_dir / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[n], stored[n]) for n in stored if ".experts." not in n)


def test_muon_leaves_stacks_to_adam_at_any_stage(results: Path, moe_dir: Path) -> None:
    whole, sharded = (load_file(results / f"muon{stage}.safetensors") for stage in (1, 3))
    assert all(torch.allclose(sharded[name], tensor, rtol=0, atol=1e-4) for name, tensor in whole.items())
    stored = load_file(moe_dir / "model.safetensors")
    changed = {name for name, tensor in whole.items() if not torch.equal(tensor, stored[name])}
    assert changed == {name for name in stored if ".experts." in name or "q_proj" in name}
