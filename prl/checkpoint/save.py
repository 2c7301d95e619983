"""Saving the trainer's part of a checkpoint."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from prl.checkpoint.fragments import copied
from prl.checkpoint.marker import unmark
from prl.checkpoint.optimizer_state import scalars, state_fragments
from prl.checkpoint.trainer_state import (
    counters,
    describe_optimizer,
    random_state,
    write_rng,
    write_state,
)
from prl.checkpoint.zero import Partition, base_optimizer, partitions, untrained
from prl.trainer.lora import adapter_config, is_low_rank


@dataclass(frozen=True)
class Snapshot:
    """What a rank has to write: its part of the tensors, `trainer_state.json`, its random state."""

    tensors: dict[str, Tensor]
    state: dict[str, Any]
    random: dict[str, Any]


def save_trainer(engine: Any, path: Path, extra: dict[str, Any]) -> None:
    """Save a DeepSpeed engine to `path` (`.../step_N/trainer`). Collective over all ranks.

    Writes an ordinary DCP of `model.<parameter>` (float32 masters) and `optim.<state>.<parameter>` under
    Hugging Face names and shapes, `trainer_state.json` and `rng/`. Every rank writes what it owns; nothing
    is gathered or copied. `path` appears, replacing an older one, when all of it is written.

    `extra`: the caller's progress, JSON only; `load_trainer` returns it.
    """
    write_snapshot(take_snapshot(engine, extra), path)


def take_snapshot(engine: Any, extra: dict[str, Any], *, copy: bool = False) -> Snapshot:
    """What this rank holds now. With `copy` in host memory, so that training may go on; else it is shared."""
    parts = partitions(engine)
    tensors = weights(engine, parts) | state_fragments(base_optimizer(engine), parts)
    if copy:
        tensors = {name: copied(tensor) for name, tensor in tensors.items()}
    return Snapshot(tensors, describe(engine, parts, extra), random_state())


def write_snapshot(snapshot: Snapshot, path: Path, group: Any = None) -> None:
    """Write the snapshots of all ranks to `path`. Collective over `group`, null = all ranks' own."""
    rank = dist.get_rank()
    temporary = path.with_name(f".{path.name}.tmp")
    if rank == 0:
        if temporary.exists():
            shutil.rmtree(temporary)
        temporary.mkdir(parents=True)
    dist.barrier(group)
    dcp.save(dict(snapshot.tensors), checkpoint_id=temporary, process_group=group)
    write_rng(temporary, rank, snapshot.random)
    if rank == 0:
        write_state(temporary, snapshot.state)
    dist.barrier(group)
    if rank == 0:
        publish(temporary, path)
    dist.barrier(group)


def file_weights(engine: Any) -> dict[str, Tensor]:
    """`model.<name in a model's files>` -> what this rank holds of it, frozen or not; no adapters."""
    found: dict[str, Tensor] = {}
    for part in partitions(engine):
        found |= part.fragments(part.flat)
    found |= untrained(engine, trained=set(found))
    return {f"model.{n.replace('.base_layer.', '.')}": t for n, t in found.items() if not is_low_rank(n)}


def weights(engine: Any, parts: list[Partition]) -> dict[str, Tensor]:
    """`model.<parameter or buffer>` -> what this rank holds of it. Tied weights appear once.

    Of a model with adapters only these: the weights beneath them never change and are on disk already.
    """
    found: dict[str, Tensor] = {}
    for part in parts:
        found |= part.fragments(part.flat)
    if adapter_config(engine.module) is None:
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
        "adapter": adapter_config(engine.module),
        "extra": extra,
    }


def publish(temporary: Path, path: Path) -> None:
    """Give `temporary` its final name; a step that loses a part is complete no longer."""
    if path.exists():
        unmark(path.parent)
        shutil.rmtree(path)
    temporary.rename(path)
