"""Schema of the groups around the engines: inference, sync, cluster, tracking."""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.fields import opt


@dataclass
class InferenceConfig:
    """What every way to sample has."""

    name: str = opt(doc="Which engine samples.")
    host: str = opt("127.0.0.1", "Address the server binds.")
    port: int = opt(0, "Port of the server; 0 = one that the system picks.", ge=0, le=65535)
    max_model_len: int = opt(512, "Longest prompt plus completion, tokens.", ge=2)
    ready_timeout: float = opt(600.0, "Seconds to wait for the engine.", gt=0)
    admin_timeout: float = opt(120.0, "Seconds one admin call (pause, update, resume) may take.", gt=0)


@dataclass
class EmbeddedConfig(InferenceConfig):
    """prl's own small sampler: continuous batching in one process, CPU or GPU."""

    name: str = "embedded"
    max_slots: int = opt(128, "Sequences decoded together.", ge=1)
    threads: int = opt(1, "CPU threads of the engine.", ge=1)
    seed: int | None = opt(None, "Seed of the sampler; null = the run's seed.")


@dataclass
class ExternalConfig(InferenceConfig):
    """An engine that someone else started and that speaks the same routes."""

    name: str = "external"
    base_url: str = opt(doc="URL ending in /v1.")
    api_key_var: str = opt("PRL_API_KEY", "Name of the environment variable that holds the key.")


@dataclass
class SyncConfig:
    """Weights go to the engines through files: written whole, marked complete, proven on both sides."""

    name: str = "filesystem"
    keep: int = opt(
        2, "Versions kept on disk; an engine may still be reading the one before the newest.", ge=2
    )
    timeout: float = opt(600.0, "Seconds to wait for a version.", gt=0)
    fingerprint: str = opt(
        "sampled", "How much of each tensor the fingerprint reads.", choices=("sampled", "full")
    )
    shard_bytes: int = opt(2_000_000_000, "Largest file of a version, bytes.", ge=1)


@dataclass
class ClusterConfig:
    """All processes on this machine, under one supervisor."""

    name: str = "local"
    train_ranks: int = opt(1, "Trainer processes (one per GPU).", ge=1)
    grace: float = opt(5.0, "Seconds between SIGTERM and SIGKILL when the run ends.", ge=0)
    start_timeout: float = opt(300.0, "Seconds the processes may take to come up.", gt=0)


@dataclass
class TrackingConfig:
    """Metrics go to JSON lines only."""

    name: str = "none"


@dataclass
class MlflowConfig(TrackingConfig):
    """Metrics also go to MLflow, from one writer."""

    name: str = "mlflow"
    uri: str | None = opt(None, "Tracking URI; null = sqlite store in the output directory.")
    experiment: str = opt("prl", "MLflow experiment.")
