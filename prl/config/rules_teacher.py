"""Rules of algorithms that need a frozen teacher (`opd`, `sft`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.algo import OpdConfig, SftAlgoConfig
from prl.config.errors import Problem
from prl.config.rules_rl import algorithms, check_api_url
from prl.config.schema import RlConfig


def teachers_are_there(config: RlConfig) -> Iterator[Problem]:
    for path, algo in algorithms(config).items():
        if not isinstance(algo, OpdConfig | SftAlgoConfig):
            continue
        teacher = algo.teacher
        yield from check_api_url(f"{path}.teacher.base_url", teacher.base_url)
        if teacher.model is None:
            reason = f"{path}={algo.name} needs a teacher, and model {config.model.name} comes with none"
            remedy = f"Name a model directory that prl shall serve, or one served at {path}.teacher.base_url."
            yield Problem(f"{path}.teacher.model", None, reason, remedy)
        elif teacher.base_url is None:
            yield from _can_be_served(f"{path}.teacher", teacher.model, config)


def _can_be_served(path: str, name: str, config: RlConfig) -> Iterator[Problem]:
    """prl serves the teacher itself: its files are here, and its tokens mean what the policy's mean."""
    from prl.model_path import named_model, resolve_model_path

    try:
        teacher = resolve_model_path(named_model(name))
    except ValueError as error:
        reason = str(error).rstrip(".").removeprefix(f"model.path={name}: ")
        yield Problem(f"{path}.model", name, reason, f"Or set {path}.base_url, if it is served elsewhere.")
        return
    try:
        policy = resolve_model_path(config.model)
    except ValueError:
        return  # told by the rule about the policy
    if _vocabulary(teacher) != _vocabulary(policy):
        reason = f"its tokenizer differs from that of model {config.model.name}"
        remedy = "A teacher judges the policy's own token ids; choose one of the same family."
        yield Problem(f"{path}.model", name, reason, remedy, ("model.name", "model.path"))


def _vocabulary(directory: Path) -> dict[str, Any] | None:
    """Token -> id, from tokenizer.json; None where a model has no such file and cannot be compared."""
    file = directory / "tokenizer.json"
    if not file.is_file():
        return None
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    added = {token["content"]: token["id"] for token in tokenizer.get("added_tokens") or []}
    vocabulary = tokenizer["model"].get("vocab")
    return {**vocabulary, **added} if isinstance(vocabulary, dict) else None
