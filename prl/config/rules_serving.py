"""Rules of the engines that prl starts, and of how weights reach them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.errors import Problem
from prl.config.schema import InferenceJobConfig
from prl.config.serving import CollectiveConfig, ExternalConfig, VllmConfig

TAKEN_OPTIONS = {
    "model": "model.path",
    "served_model_name": "model.name",
    "host": "inference.host",
    "port": "inference.port",
    "max_model_len": "inference.max_model_len",
    "tensor_parallel_size": "inference.tensor_parallel_size",
    "gpu_memory_utilization": "inference.gpu_memory_utilization",
    "seed": "inference.seed",
    "data_parallel_size": "inference.replicas",
    "worker_extension_cls": None,
    "middleware": None,
}
"""vLLM options that a key of prl decides, or (None) that prl needs for itself."""


def vllm_options_are_free(config: Any) -> Iterator[Problem]:
    engine = config.inference
    if not isinstance(engine, VllmConfig):
        return
    for key, value in engine.vllm.items():
        path = f"inference.vllm.{key}"
        if not re.fullmatch(r"[a-z][a-z0-9_]*", key):
            yield Problem(path, value, "options are written in snake case", f"Write {_snake(key)}.")
        elif key in TAKEN_OPTIONS:
            own = TAKEN_OPTIONS[key]
            remedy = f"Set {own}." if own else "Leave it out."
            yield Problem(path, value, "prl sets this option itself", remedy)


def vllm_is_installed(config: Any) -> Iterator[Problem]:
    """Looks for the package without importing it: that takes a quarter of a minute."""
    import importlib.util

    engine = config.inference
    if not isinstance(engine, VllmConfig):
        return
    if engine.python is None:
        if importlib.util.find_spec("vllm") is None:
            reason = "vLLM is not installed in this environment"
            remedy = (
                "Install the extra `gpu` or `cpu-vllm`, name another environment's interpreter by "
                "inference.python, or choose inference=embedded."
            )
            yield Problem("inference", "vllm", reason, remedy)
    elif not os.access(Path(engine.python).expanduser(), os.X_OK):
        yield Problem("inference.python", engine.python, "no such interpreter")


def replicas_fit_the_gpus(config: Any) -> Iterator[Problem]:
    engine, gpus = config.inference, config.cluster.infer_gpus
    if gpus is None or isinstance(engine, ExternalConfig):
        return
    size = getattr(engine, "tensor_parallel_size", 1)
    if gpus % size:
        reason = f"not a multiple of inference.tensor_parallel_size = {size}"
        involves = ("inference.tensor_parallel_size",)
        yield Problem(
            "cluster.infer_gpus", gpus, reason, f"Nearest: {gpus // size * size or size}.", involves
        )
    elif engine.replicas is not None and engine.replicas * size != gpus:
        reason = f"cluster.infer_gpus = {gpus} with {size} each makes {gpus // size}"
        yield Problem(
            "inference.replicas", engine.replicas, reason, "Leave one of them out.", ("cluster.infer_gpus",)
        )


def server_has_a_model(config: InferenceJobConfig) -> Iterator[Problem]:
    if isinstance(config.inference, ExternalConfig):
        yield Problem("inference", "external", "there is nothing to start", "Choose embedded or vllm.")


def broadcasts_reach_the_engines(config: Any) -> Iterator[Problem]:
    """An engine on another machine cannot join a group that meets on the loopback interface."""
    sync, engine = config.sync, config.inference
    if not isinstance(sync, CollectiveConfig) or not isinstance(engine, ExternalConfig):
        return
    host = re.sub(r"^https?://", "", engine.base_url).split("/")[0].rsplit(":", 1)[0]
    if host not in ("127.0.0.1", "localhost", "[::1]"):
        reason = f"the engine is on {host}, and the group of sync=collective meets on this machine"
        yield Problem("sync", "collective", reason, "Choose sync=filesystem.", ("inference.base_url",))


def _snake(key: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", key.lower()).strip("_")


RULES = [vllm_options_are_free, vllm_is_installed, replicas_fit_the_gpus]
"""Rules of every job that starts an engine."""
