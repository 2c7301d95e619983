"""What a role of the inference room serves, in which type, and where: the same answers for both engines."""

from __future__ import annotations

from typing import Any

from prl.config.schema import RlConfig
from prl.config.training import ModelConfig
from prl.model_path import named_model

ENGINE_PORT_OFFSET = 100
"""Engines behind a router listen so many ports above it, then one by one."""


def is_policy(role: str) -> bool:
    """Whether a role serves the policy, which takes weights; else it is a frozen teacher."""
    return role.partition("/")[0] == "inference"


def served_model(config: Any, role: str) -> ModelConfig:
    """The model of a role. A teacher's is named in its algorithm: a bundled name or a directory."""
    if is_policy(role):
        return config.model
    assert isinstance(config, RlConfig), "only training has teachers"
    owner = role.removeprefix("teacher/")
    algo = config.algo if owner == "shared" else config.env[owner].algo
    name = algo.teacher.model
    if name is None:
        raise ValueError(f"{role}: algo.teacher.model is null; name the model that prl shall serve")
    return named_model(name)


def engine_port(config: Any, role: str) -> int:
    """The port of a role; 0 lets the system pick, as for teachers: `inference.port` is the policy's."""
    port = config.inference.port
    if not is_policy(role) or port == 0:
        return 0
    _, _, replica = role.partition("/")
    return port + ENGINE_PORT_OFFSET + int(replica) if replica else port


def replicas(config: Any) -> int:
    """Engines that serve the policy: as asked for, else as many as the GPUs for inference hold."""
    engine = config.inference
    if engine.replicas is not None:
        return engine.replicas
    gpus = config.cluster.infer_gpus
    return 1 if gpus is None else gpus // getattr(engine, "tensor_parallel_size", 1)


def weight_dtype(config: Any, on_gpu: bool) -> str:
    """The type that the trainer computes with, which published weights have too."""
    trainer = getattr(config, "trainer", None)
    name = trainer.dtype if trainer is not None else getattr(config, "dtype", "auto")
    if name == "auto":
        return "bfloat16" if on_gpu else "float32"
    return name


def fingerprint_mode(config: Any) -> str:
    """How much of each tensor a fingerprint reads; an evaluation trains nothing and has no say."""
    return config.sync.fingerprint if hasattr(config, "sync") else "sampled"
