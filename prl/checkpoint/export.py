"""`prl export`: a checkpoint as a directory of safetensors that `from_pretrained` and engines load.

Streams from the sharded checkpoint one output file at a time: no model code, no process group, no more
memory than one output file. Names are those of the live Hugging Face model, tied weights come once.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from prl.checkpoint.export_source import locate, output_directory
from prl.checkpoint.model_files import copy_model_files
from prl.checkpoint.reader import CheckpointReader
from prl.checkpoint.trainer_state import saved_adapter
from prl.checkpoint.weight_source import (
    AdapterWeights,
    CheckpointWeights,
    MergedWeights,
    WeightSource,
)
from prl.config.schema import ExportConfig
from prl.sync.weight_files import ADAPTER_CONFIG, ADAPTER_FILE
from prl.tracking.mlflow_models import note_export
from prl.tracking.terminal import track
from prl.trainer.lora import TIED, peft_config


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
        out = output_directory(config.out, source)
        dtype = getattr(torch, config.dtype)
        print(
            export(
                source.step_dir,
                out,
                dtype,
                config.shard_bytes,
                source.model,
                source.num_layers,
                merge=config.merge,
            )
        )
        if told := note_export(run_of(config.run, source.step_dir), out, config.register):
            print(told)
    except (ValueError, OSError, SafetensorError) as error:
        print(f"export: {error}", file=sys.stderr)
        return 2
    return 0


def run_of(named: str, step_dir: Path) -> Path:
    """The run directory that a checkpoint belongs to; `named` if that is one."""
    path = Path(named).expanduser().absolute()
    return path if (path / "configs").is_dir() else step_dir.parent.parent


def export(
    step_dir: Path,
    out: Path,
    dtype: torch.dtype,
    shard_bytes: int,
    model_source: Path,
    num_layers: int | None = None,
    *,
    merge: bool = True,
) -> Exported:
    """Write the weights of checkpoint `step_dir` to the new directory `out`, floating point ones as `dtype`.

    A checkpoint of adapters becomes whole weights, those of `model_source` with the adapters added, or with
    `merge=False` an adapter directory of PEFT's, which names the model that it belongs to.

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
    trainer = step_dir / "trainer"
    reader, adapter = CheckpointReader(trainer), saved_adapter(trainer)
    if adapter and not merge:
        alone = AdapterWeights(reader, adapter.get(TIED))
        num_files, num_bytes = _write_adapter(alone, adapter, temporary, dtype, model_source)
    else:
        copy_model_files(model_source, temporary, dtype, num_layers)
        config = json.loads((model_source / "config.json").read_text())
        source: WeightSource = CheckpointWeights(reader, config)
        if adapter:
            source = MergedWeights(model_source, AdapterWeights(reader), adapter, num_layers)
        num_files, num_bytes = write_weights(source, temporary, dtype, shard_bytes)
    temporary.rename(out)
    return Exported(out, num_files, num_bytes, time.perf_counter() - started)


def write_weights(source: WeightSource, out: Path, dtype: torch.dtype, shard_bytes: int) -> tuple[int, int]:
    """Write all tensors of `source` as safetensors: (number of files, bytes of tensors)."""
    dtypes = {
        name: dtype if spec.dtype.is_floating_point else spec.dtype for name, spec in source.specs.items()
    }
    sizes = {name: math.prod(source.specs[name].shape) * dtypes[name].itemsize for name in dtypes}
    shards = list(plan_shards(sizes, shard_bytes))
    placed: dict[str, str] = {}
    for number, names in enumerate(track(shards, "exporting"), start=1):
        file = _file_name(number, len(shards))
        _save(source.read({name: dtypes[name] for name in names}), out / file)
        placed |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": placed}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(shards), sum(sizes.values())


def _write_adapter(
    source: AdapterWeights, adapter: dict[str, Any], out: Path, dtype: torch.dtype, model_source: Path
) -> tuple[int, int]:
    tensors = source.read(dict.fromkeys(source.specs, dtype))
    _save(tensors, out / ADAPTER_FILE)
    config = peft_config(adapter) | {"base_model_name_or_path": str(model_source)}
    (out / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    return 1, sum(tensor.nbytes for tensor in tensors.values())


def _save(tensors: dict[str, Tensor], file: Path) -> None:
    """safetensors makes files that only their owner may read; these get the permissions of any other file."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


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
