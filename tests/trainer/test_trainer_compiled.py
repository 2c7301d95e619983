"""Compiled layers and head train as the plain ones do."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from trainer_lab import IPO, make_config, make_model, make_sequences, pack

from prl.config import training
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

COMPILER = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
SGD = training.SgdConfig(lr=0.1, momentum=0.0, nesterov=False)


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="inductor needs a C++ compiler on CPUs")
def test_a_compiled_step_equals_a_plain_one(tmp_path: Path, world: World) -> None:
    """One row of a lone sequence, which is attended to inside the graph, and one of three."""
    import torch._inductor.config as inductor

    model = make_model(tmp_path / "model", num_hidden_layers=1)
    sequences = make_sequences(0, ["rl", "rl", "ce", "ref_kl"])
    rows = [pack(sequences[:1]), pack(sequences[1:])]
    found = {}
    for compiled in (False, True):
        settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", compile=compiled)
        engine = TrainEngine(make_config(model, SGD, trainer=settings), world, None)
        with inductor.patch(compile_threads=1):  # a pool of processes takes longer to start
            metrics = train_step(engine, rows, IPO, 1)
        found[compiled] = metrics, {name: tensor.clone() for name, tensor in engine.full_tensors()}
        engine.close()
    torch._dynamo.reset()
    (plain, expected), (fast, weights) = found[False], found[True]
    for name in ("loss/mean", "entropy/all/mean", "mismatch_kl/all/max"):
        assert fast[name] == pytest.approx(plain[name], abs=1e-5), name
    assert fast["optim/grad_norm"] == pytest.approx(plain["optim/grad_norm"], rel=1e-4)
    for name, weight in expected.items():
        assert torch.allclose(weights[name], weight, rtol=0, atol=1e-5), name
