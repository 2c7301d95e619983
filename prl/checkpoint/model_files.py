"""The small files of a model directory: config, generation config, tokenizer, chat template, code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

COPIED = {".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"}
TEMPLATES = "additional_chat_templates"


def copy_model_files(source: Path, target: Path, dtype: torch.dtype, num_layers: int | None) -> None:
    """Copy all but weights and documents from `source`; config.json gets `dtype` and `num_layers`.

    Raises ValueError if `source` has no config.json.
    """
    if not (source / "config.json").is_file():
        raise ValueError(f"the model directory {source} has no config.json")
    for file in source.iterdir():
        if file.is_file() and file.suffix in COPIED and not file.name.endswith(".index.json"):
            shutil.copyfile(file, target / file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, target / TEMPLATES)
    config = json.loads((source / "config.json").read_text())
    adapted = adapt_config(config, str(dtype).removeprefix("torch."), num_layers)
    (target / "config.json").write_text(json.dumps(adapted, indent=2) + "\n")


def adapt_config(config: dict[str, Any], dtype: str, num_layers: int | None) -> dict[str, Any]:
    """A Hugging Face config for weights of `dtype` and the first `num_layers` layers (None: all)."""
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": dtype}
    if "text_config" in config:
        return config | {"text_config": adapt_config(config["text_config"], dtype, num_layers)}
    if num_layers is None:
        return config
    kept = {"num_hidden_layers": num_layers}
    if config.get("layer_types"):
        kept["layer_types"] = config["layer_types"][:num_layers]
    return config | kept
