"""One of several trainer ranks that share rows: runs the cases of a job file, rank 0 writes what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from trainer_lab import IPO, make_config

from launchers.role import end_now
from prl.checkpoint.load import load_trainer
from prl.checkpoint.save import save_trainer
from prl.config import training
from prl.records import MicroBatch
from prl.trainer import distributed
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step


def run(case: dict[str, Any], model: Path, out: Path, world: World) -> tuple[list[dict[str, float]], Any]:
    """Train from step `first` on, from the checkpoint of the step before where that is not the first."""
    zero = training.ZeroConfig(stage=case["stage"], param_persistence_threshold=0)
    settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", recompute=case["recompute"])
    optim = training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01)
    engine = TrainEngine(make_config(model, optim, zero=zero, trainer=settings), world, None)
    if case["first"] > 1:
        load_trainer(engine.deepspeed, out / "saved", training.CkptConfig())
    metrics = []
    for step in range(case["first"], len(case["rows"]) + 1):
        rows = [MicroBatch(**row) for row in case["rows"][step - 1][world.data_rank]]
        metrics.append(train_step(engine, rows, IPO, step))
        if step == case.get("save_after"):
            save_trainer(engine.deepspeed, out / "saved", {"step": step})
    weights = {name: tensor.clone() for name, tensor in engine.full_tensors()}
    engine.close()
    return metrics, weights


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    size = int(os.environ["WORLD_SIZE"])
    world = distributed.join(int(os.environ["RANK"]), size, out / "store", 60, sequence=job["sequence"])
    for name, case in job["cases"].items():
        metrics, weights = run(case, Path(job["model"]), out, world)
        if world.rank == 0:
            (out / f"{name}.json").write_text(json.dumps(metrics))
            save_file(weights, out / f"{name}.safetensors")
    distributed.leave(world)


main()
end_now(0)  # as ranks of a run do
