"""Two ranks equal one rank equal the float64 loop, at every stage, with ragged rows and uneven counts."""

from __future__ import annotations

import json
import socket
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer_exact import KINDS, Muon64, adamw64
from trainer_lab import assert_equal, make_sequences, pack, reference_run, run_of_ranks, spawn

from prl.records import MicroBatch

STEPS = 20


def ranks_of(step: int, sequences: list[MicroBatch]) -> list[list[dict[str, Any]]]:
    """Rows of rank 0 and rank 1: three and two, or the reverse; every third step rank 1 has no member."""
    rows = [pack(sequences[i:j]) for i, j in ((0, 2), (2, 3), (3, 5), (5, 6), (6, 8))]
    lonely = rows.pop(3)  # the sequence of kind "none"
    if step % 3 == 2:
        parts = [rows, [lonely]]
    else:
        parts = [rows[:2], [*rows[2:], lonely]] if step % 2 else [[*rows[1:], lonely], rows[:1]]
    return [[asdict(row) for row in part] for part in parts]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    """One pair of processes for all cases, meeting in a file."""
    steps = [make_sequences(seed, KINDS) for seed in range(STEPS)]
    rows = [ranks_of(i, s) for i, s in enumerate(steps)]
    cases = {}
    for stage in range(4):
        common = {"stage": stage, "dtype": "float32"}
        cases[f"adamw{stage}"] = {**common, "optim": "adamw", "rows": rows}
        cases[f"muon{stage}"] = {**common, "optim": "muon", "rows": rows[:3]}
        if stage:
            cases[f"bf16-{stage}"] = {**common, "optim": "adamw", "rows": rows[:2], "dtype": "bfloat16"}
    lora = {"rank": 3, "alpha": 6.0, "targets": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]}
    for stage in (1, 3):
        cases[f"lora{stage}"] = {**cases[f"muon{stage}"], "optim": "adamw", "lora": lora}
    cases["hpz"] = {**cases["adamw3"], "hpz": 2, "recompute": "full"}
    out = tmp_path_factory.mktemp("two")
    spawn(out, "zero_worker.py", 2, {"model": str(model_dir), "world": 2, "cases": cases})
    return out


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> dict[str, Any]:
    steps = [make_sequences(seed, KINDS) for seed in range(STEPS)]
    return {
        "adamw": reference_run(model_dir, steps, adamw64, max_norm=1.0),
        "muon": reference_run(model_dir, steps[:3], Muon64, max_norm=1.0),
    }


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("optim", "loss_error", "weight_error"), [("adamw", 1e-6, 1e-5), ("muon", 1e-5, 3e-5)]
)
def test_two_ranks_equal_the_reference(
    stage: int,
    optim: str,
    loss_error: float,
    weight_error: float,
    results: Path,
    reference: dict[str, Any],
) -> None:
    mine = run_of_ranks(results, f"{optim}{stage}")
    errors = {"loss_error": loss_error, "norm_error": 1e-4, "weight_error": weight_error}
    assert_equal(mine, reference[optim], **errors)


def test_secondary_partitions_and_recomputation_change_nothing(results: Path) -> None:
    plain, hpz = (load_file(results / f"{name}.safetensors") for name in ("adamw3", "hpz"))
    assert all(torch.allclose(hpz[name], tensor, rtol=0, atol=1e-6) for name, tensor in plain.items())


def test_adapters_on_a_model_that_was_built_in_shards(results: Path) -> None:
    """At stage 3 no rank ever held it; the steps are those of stage 1, where each loads all of it."""
    whole, sharded = (load_file(results / f"lora{stage}.safetensors") for stage in (1, 3))
    assert all(torch.allclose(sharded[name], tensor, rtol=0, atol=1e-5) for name, tensor in whole.items())
    losses = [
        [m["loss/mean"] for m in json.loads((results / f"lora{stage}.json").read_text())] for stage in (1, 3)
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-6) and losses[0][0] != losses[0][2]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_ranks_in_bfloat16_stay_near_the_reference(
    stage: int, results: Path, reference: dict[str, Any]
) -> None:
    metrics = json.loads((results / f"bf16-{stage}.json").read_text())
    losses, norms = ([m[key] for m in metrics] for key in ("loss/mean", "optim/grad_norm"))
    assert losses == pytest.approx(reference["adamw"]["losses"][:2], abs=0.02)
    assert norms == pytest.approx(reference["adamw"]["norms"][:2], rel=0.05)


def test_metrics_are_token_means_over_both_ranks(results: Path, model_dir: Path) -> None:
    """Means over all tokens, whoever held them, equal those of a single process."""
    from trainer_lab import load_reference, sequence_logprobs

    metrics = json.loads((results / "adamw2.json").read_text())[0]
    model = load_reference(model_dir)
    values: dict[str, list[float]] = {"all": [], "env0": [], "env1": []}
    for row in make_sequences(0, KINDS):
        with torch.no_grad():
            logprobs = sequence_logprobs(model, row)
        for i, masked_in in enumerate(row.loss_mask):
            weights = (row.rl_weights or [1.0] * len(row))[i], (row.ref_kl_weights or [0.0] * len(row))[i]
            if masked_in and any(weights):
                d = float(logprobs[i]) - row.inference_logprobs[i]
                kl = float(torch.tensor(d).exp()) - d - 1
                values["all"].append(kl)
                values[row.envs[0]].append(kl)
    for env, kls in values.items():
        assert metrics[f"mismatch_kl/{env}/mean"] == pytest.approx(sum(kls) / len(kls), rel=1e-4)
        assert metrics[f"mismatch_kl/{env}/max"] == pytest.approx(max(kls), rel=1e-4)
        spread = torch.tensor(kls).std(correction=0)
        assert metrics[f"mismatch_kl/{env}/std"] == pytest.approx(float(spread), rel=1e-3)
    assert metrics["perf/throughput"] > 0


def test_variables_alone_bring_two_ranks_together(tmp_path: Path, model_dir: Path) -> None:
    """As a task of a cluster job: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, no launcher, no file."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    rows = [ranks_of(0, make_sequences(0, KINDS))]
    job = {
        "model": str(model_dir),
        "world": 99,
        "cases": {"env": {"stage": 1, "dtype": "float32", "optim": "adamw", "rows": rows}},
    }
    spawn(tmp_path, "zero_worker.py", 2, job, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    assert not (tmp_path / "store").exists()
    assert json.loads((tmp_path / "env.json").read_text())[0]["loss/mean"] > 0
