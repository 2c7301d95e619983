"""One of two ranks under ZeRO 3: whether anything holds the gathered weights between forward and backward."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from trainer_lab import make_config, make_sequences, without_a_compiler

from launchers.role import end_now
from prl.config import training
from prl.trainer import distributed
from prl.trainer import model as policy_model
from prl.trainer.engine import TrainEngine
from prl.trainer.recompute import usual_layers


def main() -> None:
    torch.set_num_threads(1)
    vars(policy_model).update(without_a_compiler())
    job = json.loads(Path(sys.argv[1]).read_text())
    world = distributed.join(int(os.environ["RANK"]), 2, Path(job["out"]) / "store", timeout=60)
    found = {
        f"compile={compiled}": held_weights(Path(job["model"]), world, compiled) for compiled in (False, True)
    }
    if world.rank == 0:
        (Path(job["out"]) / "found.json").write_text(json.dumps(found))
    distributed.leave(world)


def held_weights(model: Path, world: distributed.World, compiled: bool) -> dict[str, int]:
    """How many weights of layers forward saw, and how many of them were still there before backward."""
    zero = training.ZeroConfig(stage=3, param_persistence_threshold=0)
    settings = training.TrainerConfig(lm_head_chunk=5, dtype="float32", compile=compiled)
    engine = TrainEngine(make_config(model, training.AdamWConfig(), zero=zero, trainer=settings), world, None)
    seen: list[StorageWeakRef] = []

    def look(layer: torch.nn.Module, *_: Any) -> None:
        seen.extend(StorageWeakRef(weight.untyped_storage()) for weight in layer.parameters())

    for layer in usual_layers(engine.model):
        layer.register_forward_pre_hook(look)
    (row,) = make_sequences(0, ["rl"])
    ids, positions = torch.tensor(row.input_ids), torch.tensor(row.position_ids)
    logprobs, _ = engine.forward(ids, positions, torch.tensor(row.temperatures), (len(row),))
    held = sum(not storage.expired() for storage in seen)
    engine.backward(logprobs[1:].sum())
    engine.close()
    return {"seen": len(seen), "held": held}


if __name__ == "__main__":
    main()
    end_now(0)  # as ranks of a run do
