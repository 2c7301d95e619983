"""One of several trainer ranks on GPUs: runs the cases of a job file, rank 0 writes what came out."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from gpu_lab import IPO, make_config, rows_of
from safetensors.torch import save_file

from launchers.role import end_now
from prl.checkpoint.load import load_trainer
from prl.config import training
from prl.trainer import checkpoints, distributed
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

DOCUMENTS = (1, 3, 2, 12)
"""Documents of the four rows of each step; ranks share them out."""


def train(engine: TrainEngine, world: World, steps: range) -> list[dict[str, float]]:
    found = []
    for step in steps:
        rows = rows_of(step, DOCUMENTS)[world.data_rank :: world.data_size]
        found.append(train_step(engine, rows, IPO, step))
    return found


def tensors(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().float().cpu().clone() for name, tensor in engine.full_tensors()}


def resumed(case: dict[str, Any], config: Any, world: World, out: Path) -> dict[str, Any]:
    """Two steps, an asynchronous save while the third runs, and the third again from what was saved."""
    engine = TrainEngine(config, world, None)
    seen: list[int] = []
    engine.saver.start(lambda _: seen.append(torch.cuda.current_device()))
    train(engine, world, range(1, 3))
    ckpt = training.CkptConfig(async_save=True)
    checkpoints.save(engine, ckpt, out / "ckpt", 2, parts=["trainer"], timeout=60)
    metrics = train(engine, world, range(3, 4))
    expected = tensors(engine)
    engine.close()
    engine = TrainEngine(config, world, None)
    load_trainer(engine.deepspeed, out / "ckpt" / "step_2" / "trainer", training.CkptConfig())
    again = train(engine, world, range(3, 4))
    found = tensors(engine)
    engine.close()
    gap = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    losses = [metrics[0]["loss/mean"], again[0]["loss/mean"]]
    return {"losses": losses, "gap": gap, "devices": distributed.all_gather_json(seen, world)}


def trained(config: Any, world: World, file: Path) -> dict[str, Any]:
    engine = TrainEngine(config, world, None)
    start = tensors(engine)
    metrics = train(engine, world, range(1, 4))
    weights = tensors(engine)
    engine.close()
    if world.rank == 0:
        save_file({name: weights[name] - start[name] for name in weights}, file)
    keys = {"losses": "loss/mean", "norms": "optim/grad_norm", "entropy": "entropy/all/mean"}
    return {name: [m[key] for m in metrics] for name, key in keys.items()}


def main() -> None:
    torch.set_float32_matmul_precision("highest")
    job = json.loads(Path(sys.argv[1]).read_text())
    out, size = Path(job["out"]), int(os.environ["WORLD_SIZE"])
    world = distributed.join(int(os.environ["RANK"]), size, out / "store", 120, job.get("sequence", 1))
    found = {}
    for name, case in job["cases"].items():
        config = make_config(Path(job["model"]), zero=case["zero"], **case.get("trainer", {}))
        if case.get("resume"):
            found[name] = resumed(case, config, world, out / name)
        else:
            found[name] = trained(config, world, out / f"{name}.safetensors")
    if world.rank == 0:
        (out / "found.json").write_text(json.dumps(found))
    distributed.leave(world)


main()
end_now(0)  # as ranks of a run do
