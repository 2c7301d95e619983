"""One of several trainer ranks: runs the cases of a job file, rank 0 writes what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from trainer_lab import IPO, make_config, without_a_compiler

from launchers.role import end_now
from prl.config import training
from prl.records import MicroBatch
from prl.trainer import distributed, model
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

OPTIMIZERS = {
    "adamw": training.AdamWConfig(lr=1e-3, betas=[0.9, 0.95], eps=1e-5, weight_decay=0.01),
    "lora": training.AdamWConfig(lr=1e-2, betas=[0.9, 0.95], eps=1e-5),
    "muon": training.MuonConfig(lr=0.01, adam_lr=1e-3, eps=1e-5),
}


def main() -> None:
    torch.set_num_threads(1)
    vars(model).update(without_a_compiler())
    job = json.loads(Path(sys.argv[1]).read_text())
    out = Path(job["out"])
    world = distributed.join(int(os.environ["RANK"]), job["world"], out / "store", timeout=60)
    for name, case in job["cases"].items():
        zero = training.ZeroConfig(
            stage=case["stage"], param_persistence_threshold=0, hpz_partition_size=case.get("hpz", 1)
        )
        settings = training.TrainerConfig(
            lm_head_chunk=5,
            dtype=case["dtype"],
            recompute=case.get("recompute", "none"),
            compile=case.get("compile", False),
        )
        lora = training.LoraConfig(**case.get("lora", {}))
        optim = OPTIMIZERS[case["optim"]]
        config = make_config(Path(job["model"]), optim, zero=zero, trainer=settings, lora=lora)
        engine = TrainEngine(config, world, None)
        metrics = []
        for step, ranks in enumerate(case["rows"], 1):
            rows = [MicroBatch(**row) for row in ranks[world.rank]]
            metrics.append(train_step(engine, rows, IPO, step))
        weights = {n: t.clone() for n, t in engine.full_tensors()}
        engine.close()
        if world.rank == 0:
            weights = {name: tensor.cpu() for name, tensor in weights.items()}
            (out / f"{name}.json").write_text(json.dumps(metrics))
            save_file(weights, out / f"{name}.safetensors")
    distributed.leave(world)


if __name__ == "__main__":
    main()
    end_now(0)  # as ranks of a run do
