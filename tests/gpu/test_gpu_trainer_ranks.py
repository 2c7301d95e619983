"""Two trainer ranks over NCCL equal one: ZeRO 1, 2, 3, sequence parallelism, checkpoints.

NCCL_NVLS_ENABLE=0 python -m pytest -m gpu tests/gpu/test_gpu_trainer_ranks.py

Needs two GPUs, or one that both ranks share: NCCL 2.30 allows it when NCCL_MULTI_RANK_GPU_ENABLE=1 is set.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.device_count() < (1 if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" else 2):
    pytest.skip("needs two NVIDIA GPUs, or one that NCCL 2.30 lets two ranks share", allow_module_level=True)

from gpu_lab import make_model, spawn
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

STAGES = (1, 2, 3)


def cases() -> dict[str, Any]:
    """Float32 is exact, bfloat16 is what is used; recomputation and hpZ at stage 3 too."""
    found: dict[str, Any] = {}
    for stage in STAGES:
        for dtype in ("float32", "bfloat16"):
            found[f"{dtype}-{stage}"] = {"zero": {"stage": stage}, "trainer": {"dtype": dtype}}
    sharded = {"zero": {"stage": 3}}
    for recompute in ("full", "selective"):
        found[f"{recompute}-3"] = {**sharded, "trainer": {"dtype": "float32", "recompute": recompute}}
    for recompute in ("none", "full"):
        more = {"dtype": "float32", "recompute": recompute, "compile": True}
        found[f"compiled-{recompute}-3"] = {**sharded, "trainer": more}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("ranks")
    model = str(make_model(out / "model"))
    alone = spawn(out / "one", 1, {"model": model, "cases": cases()})
    hpz = {"zero": {"stage": 3, "hpz_partition_size": 2}, "trainer": {"dtype": "float32"}}
    resume = {f"resume-{s}": {"zero": {"stage": s}, "resume": True} for s in STAGES}
    pair = spawn(out / "two", 2, {"model": model, "cases": cases() | resume | {"hpz": hpz}})
    long = {"zero": {"stage": 1}, "trainer": {"dtype": "float32", "sequence_parallel": 2}}
    deep = {
        "zero": {"stage": 3},
        "trainer": {"dtype": "bfloat16", "sequence_parallel": 2, "recompute": "full"},
    }
    shared = spawn(out / "shared", 2, {"model": model, "sequence": 2, "cases": {"long": long, "deep": deep}})
    return {"out": out, "one": alone, "two": pair, "shared": shared}


def apart(found: Path, expected: Path) -> float:
    """How far two movements of the weights are apart, as a share of the second."""
    mine, other = load_file(found), load_file(expected)
    assert mine.keys() == other.keys()
    difference = sum(float((mine[name] - other[name]).square().sum()) for name in other)
    return (difference / sum(float(tensor.square().sum()) for tensor in other.values())) ** 0.5


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(("dtype", "rel", "share"), [("float32", 1e-4, 1e-3), ("bfloat16", 1e-2, 0.1)])
def test_two_ranks_equal_one(
    stage: int, dtype: str, rel: float, share: float, results: dict[str, Any]
) -> None:
    """The weights that engines get are of the compute type: in bfloat16 the share has their rounding."""
    name = f"{dtype}-{stage}"
    for key, values in results["one"][name].items():
        assert results["two"][name][key] == pytest.approx(values, rel=rel, abs=1e-5), key
    file = f"{name}.safetensors"
    assert apart(results["out"] / "two" / file, results["out"] / "one" / file) < share


@pytest.mark.parametrize("name", ["full-3", "selective-3", "compiled-none-3", "compiled-full-3", "hpz"])
def test_recomputation_compilation_and_secondary_partitions_change_nothing(
    name: str, results: dict[str, Any]
) -> None:
    assert results["two"][name]["losses"] == pytest.approx(results["one"]["float32-3"]["losses"], rel=1e-4)
    expected = results["out"] / "one" / "float32-3.safetensors"
    assert apart(results["out"] / "two" / f"{name}.safetensors", expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "same", "rel", "share"),
    [("long", "float32-1", 1e-4, 1e-3), ("deep", "bfloat16-3", 1e-2, 0.1)],
)
def test_ranks_that_share_rows_equal_one(
    name: str, same: str, rel: float, share: float, results: dict[str, Any]
) -> None:
    """In bfloat16 the loss is what is left of advantages that cancel: its rounding counts absolutely."""
    least = 1e-3 if same.startswith("bfloat16") else 1e-5
    for key, values in results["one"][same].items():
        assert results["shared"][name][key] == pytest.approx(values, rel=rel, abs=least), key
    out = results["out"]
    assert apart(out / "shared" / f"{name}.safetensors", out / "one" / f"{same}.safetensors") < share


@pytest.mark.parametrize("stage", STAGES)
def test_a_save_beside_the_training_holds_the_step_it_was_asked_for(
    stage: int, results: dict[str, Any]
) -> None:
    """Resumed from a save that was written while the next step ran; kernels may differ in the last bits."""
    found = results["two"][f"resume-{stage}"]
    first, second = found["losses"]
    assert second == pytest.approx(first, rel=1e-4) and found["gap"] < 1e-3
    assert found["devices"] == [[0], [1 % torch.cuda.device_count()]], (
        "the thread that saves is on the GPU of its rank"
    )
