"""Loading the trainer's part of a checkpoint, at any ZeRO stage and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from prl.checkpoint.optimizer_state import prepare, state_fragments
from prl.checkpoint.reader import CheckpointReader
from prl.checkpoint.save import weights
from prl.checkpoint.trainer_state import check_optimizer, read_state, restore_counters, restore_rng
from prl.checkpoint.zero import Partition, base_optimizer, loading, partitions
from prl.config.training import CkptConfig
from prl.trainer.lora import adapter_config


def load_trainer(engine: Any, path: Path, ckpt: CkptConfig) -> dict[str, Any]:
    """Load what `save_trainer` wrote to `path` (`.../step_N/trainer`) into a DeepSpeed engine. Collective.

    Each rank reads its own slices into the ZeRO buffers. At the same stage and number of ranks training
    continues bitwise; otherwise the weights are bitwise and the rest is rounding. Returns the saved `extra`;
    the place in the schedule is the caller's and belongs there.

    `ckpt.skip_optimizer` leaves the optimizer fresh, `ckpt.skip_progress` DeepSpeed's counters and the random
    state. Hyper-parameters are those of the engine; one that changed since the save is logged.

    Raises ValueError if the checkpoint is of another model, optimizer or format.
    """
    state, reader = read_state(path), CheckpointReader(path)
    check_adapter(path, adapter_config(engine.module), state.get("adapter"))
    with loading(engine):
        parts = partitions(engine)
        targets = weights(engine, parts)
        check_model(path, targets, reader)
        if not ckpt.skip_optimizer:
            targets |= _optimizer_targets(engine, parts, reader, state)
        reader.read_into(targets)
    if not ckpt.skip_progress:
        restore_counters(engine, state["counters"])
        restore_rng(path, dist.get_rank())
    return state["extra"]


def check_adapter(path: Path, now: Mapping[str, Any] | None, saved: Mapping[str, Any] | None) -> None:
    """Raises ValueError if only one side has adapters, or those of another shape or scale."""
    keys = ("r", "lora_alpha", "target_modules", "modules_to_save")
    ours, theirs = ({key: a.get(key) for key in keys} if a else None for a in (now, saved))
    if ours != theirs:
        raise ValueError(
            f"{path} was saved with {_adapter_title(theirs)}, the run has {_adapter_title(ours)}: "
            "resume with the same lora.rank, lora.alpha, lora.targets and lora.modules_to_save"
        )


def _adapter_title(adapter: Mapping[str, Any] | None) -> str:
    if adapter is None:
        return "no adapters (lora=none)"
    targets = ",".join(adapter["target_modules"])
    whole = ",".join(adapter["modules_to_save"] or [])
    beside = f" and all of {whole}" if whole else ""
    return f"adapters of rank {adapter['r']}, alpha {adapter['lora_alpha']:g} on {targets}{beside}"


def check_model(path: Path, targets: Mapping[str, Tensor], reader: CheckpointReader) -> None:
    """Raises ValueError unless the checkpoint holds exactly the weights `targets`, in their shapes."""
    stored = {name: entry for name, entry in reader.tensors.items() if name.startswith("model.")}
    problems = [f"{name} is missing" for name in sorted(targets.keys() - stored.keys())]
    problems += [f"{name} is unknown to the model" for name in sorted(stored.keys() - targets.keys())]
    problems += [
        f"{name} has shape {tuple(stored[name].size)} instead of {tuple(tensor.shape)}"
        for name, tensor in targets.items()
        if name in stored and stored[name].size != tensor.shape
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise ValueError(f"{path} is a checkpoint of another model: {'; '.join(problems[:3])}{more}")


def _optimizer_targets(
    engine: Any, parts: list[Partition], reader: CheckpointReader, state: dict[str, Any]
) -> dict[str, Tensor]:
    optimizer = base_optimizer(engine)
    stored = {n: entry.properties.dtype for n, entry in reader.tensors.items() if n.startswith("optim.")}
    check_optimizer(optimizer, state["optimizer"])
    prepare(optimizer, parts, stored, state["scalars"])
    return {name: fragment for name, fragment in state_fragments(optimizer, parts).items() if name in stored}
