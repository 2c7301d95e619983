"""Saving the trainer's part of a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from prl.checkpoint.marker import unmark
from prl.checkpoint.optimizer_state import scalars, state_fragments
from prl.checkpoint.trainer_state import counters, describe_optimizer, write_rng, write_state
from prl.checkpoint.zero import Partition, base_optimizer, partitions, untrained


def save_trainer(engine: Any, path: Path, extra: dict[str, Any]) -> None:
    """Save a DeepSpeed engine to `path` (`.../step_N/trainer`). Collective over all ranks.

    Writes an ordinary DCP of `model.<parameter>` (float32 masters) and `optim.<state>.<parameter>` under
    Hugging Face names and shapes, `trainer_state.json` and `rng/`. Every rank writes what it owns; nothing
    is gathered or copied. `path` appears, replacing an older one, when all of it is written.

    `extra`: the caller's progress, JSON only; `load_trainer` returns it.
    """
    rank = dist.get_rank()
    temporary = path.with_name(f".{path.name}.tmp")
    if rank == 0:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
    dist.barrier()
    parts = partitions(engine)
    optimizer = base_optimizer(engine)
    dcp.save(weights(engine, parts) | state_fragments(optimizer, parts), checkpoint_id=temporary)
    write_rng(temporary, rank)
    if rank == 0:
        write_state(temporary, describe(engine, parts, extra))
    dist.barrier()
    if rank == 0:
        publish(temporary, path)
    dist.barrier()


def weights(engine: Any, parts: list[Partition]) -> dict[str, Tensor]:
    """`model.<parameter or buffer>` -> what this rank holds of it. Tied weights appear once."""
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= part.fragments(part.flat)
    found |= untrained(engine, trained=set(found))
    return {f"model.{name}": tensor for name, tensor in found.items()}


def describe(engine: Any, parts: list[Partition], extra: dict[str, Any]) -> dict[str, Any]:
    """Contents of `trainer_state.json`."""
    optimizer = base_optimizer(engine)
    return {
        "zero_stage": engine.zero_optimization_stage(),
        "world_size": dist.get_world_size(),
        "counters": counters(engine),
        "optimizer": describe_optimizer(optimizer),
        "scalars": scalars(optimizer, parts),
        "extra": extra,
    }


def publish(temporary: Path, path: Path) -> None:
    """Give `temporary` its final name; a step that loses a part is complete no longer."""
    if path.exists():
        unmark(path.parent)
        shutil.rmtree(path)
    temporary.rename(path)
