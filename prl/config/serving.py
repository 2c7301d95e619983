"""Schema of the groups around the engines: inference, sync, cluster, tracking."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prl.config.fields import opt


@dataclass
class InferenceConfig:
    """What every way to sample has."""

    name: str = opt(doc="Which engine samples.")
    host: str = opt("127.0.0.1", "Address the server binds.")
    port: int = opt(0, "Port of the server; 0 = one that the system picks.", ge=0, le=65535)
    replicas: int | None = opt(
        None,
        "Engines behind one router; null = cluster.infer_gpus / tensor_parallel_size, 1 on CPUs.",
        ge=1,
    )
    max_model_len: int = opt(
        512, "Longest prompt plus completion, tokens; a dry run's memory grows with it.", ge=2
    )
    ready_timeout: float = opt(
        600.0, "Seconds to wait for the engine; large models from slow disks need more.", gt=0
    )
    admin_timeout: float = opt(120.0, "Seconds one admin call (pause, update, resume) may take.", gt=0)


@dataclass
class EmbeddedConfig(InferenceConfig):
    """prl's own small sampler: continuous batching in one process, CPU or GPU."""

    name: str = "embedded"
    max_slots: int = opt(128, "Sequences decoded together.", ge=1)
    threads: int = opt(1, "CPU threads of the engine.", ge=1)
    seed: int | None = opt(None, "Seed of the sampler; null = the run's seed.")


@dataclass
class VllmConfig(InferenceConfig):
    """vLLM's own server with prl's routes for weights; needs the extra `gpu` or `cpu-vllm`."""

    name: str = "vllm"
    tensor_parallel_size: int = opt(1, "GPUs that share one engine's weights.", ge=1)
    gpu_memory_utilization: float = opt(
        0.9, "Share of a GPU that an engine takes; lower it where a trainer is on the same GPU.", gt=0, le=1
    )
    threads: int = opt(1, "CPU threads of the engine (CPU package).", ge=1)
    seed: int | None = opt(None, "Seed of the engine; null = the run's seed.")
    python: str | None = opt(
        None, "Interpreter of another environment that has vLLM; null = the one that runs prl."
    )
    vllm: dict[str, Any] = opt(
        factory=dict, doc="Any option of `vllm serve`, in snake case; these win over what prl sets."
    )
    env: dict[str, str] = opt(factory=dict, doc="Further environment variables of the engine (VLLM_...).")


@dataclass
class ExternalConfig(InferenceConfig):
    """An engine that someone else started and that speaks the same routes."""

    name: str = "external"
    base_url: str = opt(doc="URL ending in /v1.")
    api_key_var: str = opt("PRL_API_KEY", "Name of the environment variable that holds the key.")
    headers: dict[str, str] = opt(factory=dict, doc="Extra HTTP headers of every call.")


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
class CollectiveConfig(SyncConfig):
    """Weights go from the trainer's memory to the engines' by broadcast: NCCL between GPUs, on the card
    where all share one, gloo else."""

    name: str = "collective"
    timeout: float = opt(
        600.0, "Seconds to wait for the engines to join, and that one broadcast may take.", gt=0
    )
    bucket_bytes: int = opt(
        256_000_000, "Bytes of one broadcast; tensors are packed into it layer by layer.", ge=1
    )


@dataclass
class ClusterConfig:
    """All processes on this machine, under one supervisor."""

    name: str = "local"
    train_ranks: int = opt(1, "Trainer processes (one per GPU).", ge=1)
    infer_gpus: int | None = opt(None, "GPUs of the engines; null = one engine's.", ge=1)
    gpu_gb: float | None = opt(
        None, "Memory of one GPU, GB, for the estimate of a dry run; null = ask this machine's driver.", gt=0
    )
    grace: float = opt(5.0, "Seconds between SIGTERM and SIGKILL when the run ends.", ge=0)
    start_timeout: float = opt(300.0, "Seconds the processes may take to come up.", gt=0)
    parallel: int = opt(1, "Elements of a local sweep that run side by side.", ge=1)


@dataclass
class TrackingConfig:
    """Metrics go to JSON lines only."""

    name: str = "none"
    token_logprobs: int = opt(
        64, "Trained traces a step and rank whose trainer logprobs are kept with the traces; 0 = none.", ge=0
    )
    system_seconds: float = opt(
        15.0, "Seconds between looks at CPU, memory, disk, network and GPUs; 0 = none.", ge=0
    )


@dataclass
class MlflowConfig(TrackingConfig):
    """Metrics also go to MLflow, from one writer."""

    name: str = "mlflow"
    uri: str | None = opt(None, "Tracking URI; null = sqlite store in the output directory.")
    experiment: str = opt("prl", "MLflow experiment.")
    traces_per_step: int = opt(1, "Episodes of a step that become MLflow traces; 0 = none.", ge=0)
    max_traces: int = opt(100, "MLflow traces of a run at most, spread over its steps.", ge=0)
    register_model: str | None = opt(
        None, "Registered model that gets the weights of the finished run as a version; null = none."
    )


@dataclass
class MonitorConfig:
    """How others see whether the processes of a run are well."""

    endpoints: bool = opt(False, "Every process serves /metrics (Prometheus) and /healthz on its own port.")
    host: str = opt("127.0.0.1", "Address that these ports are bound to.")
    heartbeat_url: str | None = opt(None, "URL that is fetched as long as the run makes progress.")
    dashboard: str = opt(
        "auto",
        "Whether a run starts the dashboard; auto = only on a terminal, never in CI or a SLURM job.",
        choices=("auto", "always", "never"),
    )
    heartbeat_seconds: float = opt(30.0, "Shortest time between two such fetches.", gt=0)
