"""The result of a run as a model directory that `from_pretrained` loads."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from prl.model_path import EXPORTED_STEP
from prl.trainer.engine import TrainEngine

log = logging.getLogger(__name__)

WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def export_weights(engine: TrainEngine, source: Path, out: Path, step: int) -> None:
    """Write the weights of `step` to `out`, beside config and tokenizer files copied from `source`.

    Collective; rank 0 writes, under a temporary name that is renamed when all is there.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in engine.full_tensors():
        if engine.world.rank == 0:
            tensors[name] = tensor.to("cpu", copy=True).contiguous()
    if engine.world.rank:
        return
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copy(file, temporary)
    _describe(temporary / "config.json", engine, next(iter(tensors.values())))
    (temporary / EXPORTED_STEP).write_text(json.dumps({"step": step}))
    save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    log.info("wrote %s", out)


def _describe(config_file: Path, engine: TrainEngine, example: Tensor) -> None:
    """Put the type and the number of layers of what was trained into the copied config."""
    config = json.loads(config_file.read_text())
    config["dtype"] = str(example.dtype).removeprefix("torch.")
    config["num_hidden_layers"] = engine.model.config.num_hidden_layers
    config_file.write_text(json.dumps(config, indent=2) + "\n")
