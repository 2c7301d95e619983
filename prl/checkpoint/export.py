"""`prl export`: a checkpoint as a directory of safetensors that `from_pretrained` and engines load.

Streams from the sharded checkpoint one output file at a time: no model code, no process group, no more
memory than one output file. Names are those of the live Hugging Face model, tied weights come once.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from prl.checkpoint.export_source import locate
from prl.checkpoint.model_files import copy_model_files
from prl.checkpoint.reader import CheckpointReader
from prl.config.schema import ExportConfig

PREFIX = "model."


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path
    num_files: int
    num_bytes: int
    seconds: float

    def __str__(self) -> str:
        megabytes = self.num_bytes / 1e6
        return (
            f"wrote {self.path}: {megabytes:.1f} MB in {self.num_files} safetensors file(s), "
            f"{self.seconds:.1f} s, {megabytes / self.seconds:.0f} MB/s"
        )


def run(config: ExportConfig) -> int:
    """The job of `python -m prl export`; the exit code: 0, or 2 after one line that says what is wrong."""
    try:
        source = locate(config.run, config.step)
        out = Path(config.out).expanduser().absolute() if config.out else source.step_dir / "weights"
        dtype = getattr(torch, config.dtype)
        print(export(source.step_dir, out, dtype, config.shard_bytes, source.model, source.num_layers))
    except (ValueError, OSError, SafetensorError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    return 0


def export(
    step_dir: Path,
    out: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    model_source: Path,
    num_layers: int | None = None,
) -> Exported:
    """Write the weights of checkpoint `step_dir` to the new directory `out`, floating point ones as `dtype`.

    `shard_bytes`: largest file, unless one tensor is larger. `model_source`: directory that config, tokenizer
    and chat template are copied from. `num_layers`: how many layers of that model were trained; None = all.

    `out` gets its name when all of it is written. Raises ValueError if `out` exists and is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: remove it or choose another out=")
    started = time.perf_counter()
    temporary = out.with_name(f".{out.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir(parents=True)
    copy_model_files(model_source, temporary, dtype, num_layers)
    num_files, num_bytes = write_weights(step_dir / "trainer", temporary, dtype, shard_bytes)
    temporary.rename(out)
    return Exported(out, num_files, num_bytes, time.perf_counter() - started)


def write_weights(trainer: Path, out: Path, dtype: torch.dtype, shard_bytes: int) -> tuple[int, int]:
    """Write the `model.*` tensors of a DCP directory as safetensors: (number of files, bytes of tensors)."""
    reader = CheckpointReader(trainer)
    dtypes = {
        name: dtype if entry.properties.dtype.is_floating_point else entry.properties.dtype
        for name, entry in reader.tensors.items()
        if name.startswith(PREFIX)
    }
    sizes = {name: reader.tensors[name].size.numel() * dtypes[name].itemsize for name in dtypes}
    shards = list(plan_shards(sizes, shard_bytes))
    placed: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _file_name(number, len(shards))
        tensors = {name: torch.empty(reader.tensors[name].size, dtype=dtypes[name]) for name in names}
        reader.read_into(tensors)
        bare = {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
        save_file(bare, out / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(bare, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(shards), sum(sizes.values())


def plan_shards(sizes: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """Names in layer order, cut into runs of at most `shard_bytes`; a larger tensor is a run by itself."""
    run: list[str] = []
    used = 0
    for name in sorted(sizes, key=_layer_order):
        if run and used + sizes[name] > shard_bytes:
            yield run
            run, used = [], 0
        run.append(name)
        used += sizes[name]
    yield run


def _layer_order(name: str) -> list[str]:
    return [part.zfill(8) if part.isdecimal() else part for part in name.split(".")]


def _file_name(number: int, total: int) -> str:
    return "model.safetensors" if total == 1 else f"model-{number:05d}-of-{total:05d}.safetensors"
