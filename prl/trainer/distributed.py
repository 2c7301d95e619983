"""The trainer's process group, and DeepSpeed without a compiler.

With MASTER_ADDR in the environment (one task of a cluster job) the usual variables count; without it the
ranks of this machine meet in a file of the run directory, so that no port has to be guessed.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class World:
    """This process among the trainer ranks."""

    rank: int
    size: int
    device: torch.device
    adopted: bool = False
    """Whether the process group was there before, and is someone else's to end."""
    sequence: int = 1
    """Ranks that share each row (sequence parallelism); neighbours, and they get the same rows."""

    @property
    def data_rank(self) -> int:
        """Which of the `data_size` shares of a batch this rank works on."""
        return self.rank // self.sequence

    @property
    def data_size(self) -> int:
        return self.size // self.sequence

    @property
    def sequence_rank(self) -> int:
        """Which part of its rows this rank works on."""
        return self.rank % self.sequence

    @property
    def leads(self) -> bool:
        """Whether this rank is the one that tells about the rows that it shares."""
        return self.sequence_rank == 0


def join(rank: int, size: int, meeting_file: Path, timeout: float, sequence: int = 1) -> World:
    """Join the trainer's process group (gloo on CPUs, NCCL on GPUs), or adopt the one that is there.

    `rank` and `size` count only without MASTER_ADDR. `meeting_file` must be new for each launch.
    `timeout`: seconds any collective may take; `sequence`: ranks that share each row. Raises ValueError on an
    incomplete environment and for a size that is not a multiple of `sequence`.
    """
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
        return _world(rank, size, _claim_device(rank), sequence, adopted=True)
    meeting: dict[str, Any] = {"init_method": "env://"}
    if "MASTER_ADDR" in os.environ:
        rank, size = _place_in_environment()
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting_file.parent.mkdir(parents=True, exist_ok=True)
        meeting = {"store": dist.FileStore(str(meeting_file), size)}
    device = _claim_device(rank)
    backend = "nccl" if device.type == "cuda" else "gloo"
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as in the engines that weights are broadcast to
    dist.init_process_group(
        backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout), **meeting
    )
    return _world(rank, size, device, sequence)


def _world(rank: int, size: int, device: torch.device, sequence: int, adopted: bool = False) -> World:
    if size % sequence:
        raise ValueError(f"trainer.sequence_parallel={sequence}: {size} ranks are not a multiple of it")
    return World(rank, size, device, adopted, sequence)


def leave(world: World) -> None:
    """End the process group, unless it was adopted, and with it what DeepSpeed remembers of it."""
    if world.adopted:
        return
    remembered = sys.modules.get("deepspeed.comm")
    if remembered is not None and remembered.is_initialized():
        remembered.destroy_process_group()
    else:
        dist.destroy_process_group()


def _place_in_environment() -> tuple[int, int]:
    missing = [name for name in VARIABLES if name not in os.environ]
    if missing:
        raise ValueError(f"MASTER_ADDR is set without {', '.join(missing)}: set them all or none")
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def _claim_device(rank: int) -> torch.device:
    """The device of this rank; LOCAL_RANK picks the GPU, and DeepSpeed reads it too."""
    if not torch.cuda.is_available():
        os.environ.setdefault("LOCAL_RANK", str(rank))
        return torch.device("cpu")
    place = local_place(os.environ.get("LOCAL_RANK"), rank, torch.cuda.device_count())
    os.environ["LOCAL_RANK"] = str(place)
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    return device


def local_place(told: str | None, rank: int, visible: int) -> int:
    """Which of the `visible` GPUs a rank takes: that of LOCAL_RANK if it was told one.

    Where every task of a node sees its own GPU alone, that is the first, whatever LOCAL_RANK says.
    """
    return (rank if told is None else int(told)) % visible


def import_deepspeed() -> ModuleType:
    """`deepspeed`, quiet, and on CPUs without its shared-memory op, which needs a minute of C++ compilation.

    Two things that a trainer has no use for are kept out, together over three seconds of CPU time and 200 MB:
    mlflow, which the autotuner imports where it is installed, and inductor, which comes with the compiled
    kernels of DeepSpeed's own Muon.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with _absent("mlflow"):
        import deepspeed
        from deepspeed.runtime import bf16_optimizer, compiler
        from deepspeed.runtime.zero import partition_parameters, partitioned_param_coordinator
    compile_kernel = compiler.compile
    compiler.compile = lambda *_, **__: lambda kernel: kernel
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_kernel
    deepspeed.utils.logger.setLevel(logging.WARNING)
    # Its lines look like all the others: by the handler of the process, not by one of its own.
    deepspeed.utils.logger.handlers.clear()
    deepspeed.utils.logger.propagate = True
    # It prints the memory in use four times for every engine in bfloat16.
    bf16_optimizer.see_memory_usage = lambda *_, **__: None
    # For each weight that comes or goes it asks four times for its rank, to decide not to print.
    for sharding in (partition_parameters, partitioned_param_coordinator):
        sharding.print_rank_0 = lambda *_, **__: None
    # It calls collectives by names that newer releases of torch deprecate: one warning for each call.
    warnings.filterwarnings("ignore", message="`torch.distributed", category=FutureWarning)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextmanager
def _absent(module: str) -> Iterator[None]:
    """Inside, importing `module` for the first time raises ImportError, as if it were not installed."""
    if module in sys.modules:
        yield
        return
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[module]


def all_gather_json(value: Any, world: World) -> list[Any]:
    """`value` (anything JSON can hold) of every rank, by rank. Collective; ranks may pass different keys."""
    if world.size == 1:
        return [value]
    data = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=world.device)
    return [json.loads(bytes(row.tolist())) for row in all_gather_rows(data, world)]


def all_gather_rows(row: Tensor, world: World) -> list[Tensor]:
    """The 1-d `row` of every rank, by rank; they may be of different lengths. Collective."""
    if world.size == 1:
        return [row]
    sizes = [torch.zeros(1, dtype=torch.int64, device=world.device) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([row.numel()], device=world.device))
    padded = row.new_zeros(max(int(size) for size in sizes))
    padded[: row.numel()] = row
    rows = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(rows, padded)
    return [found[: int(size)] for found, size in zip(rows, sizes, strict=True)]
