"""The jobs' top-level schemas and the table of config groups.

A group is a discriminated union: the `name` of a group's node picks its dataclass in `GROUPS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prl.config import algo, cluster, curriculum, evals, loss, serving, sources, training
from prl.config.env_vars import EnvVarsConfig
from prl.config.fields import opt
from prl.config.sft import (
    FakeDataConfig,
    RowsDataConfig,
    SftExportConfig,
    ValConfig,
    WarmStartDataConfig,
)


@dataclass
class RunConfig:
    """Identity of the run."""

    name: str | None = opt(None, "Name and directory of the run; null = <envs>--<model>--<short id>.")
    resume: str | None = opt(
        None, "`latest`, a step of this run, or a checkpoint directory (`.../checkpoints/step_N`)."
    )
    clean: bool = opt(False, "Delete an existing run of this name first.")
    tags: dict[str, str] = opt(factory=dict, doc="Tags of the MLflow run.")


@dataclass
class RolloutSamplingConfig:
    """How training completions are sampled."""

    temperature: float = opt(1.0, "Sampling temperature; the learner divides logits by it.", gt=0, le=2)
    top_p: float = opt(1.0, "Nucleus sampling; 1 = off, as the learner assumes.", gt=0, le=1)
    top_k: int = opt(-1, "Top-k sampling; -1 = off, as the learner assumes.", ge=-1)
    max_tokens: int | None = opt(
        None, "Longest completion of one turn; null = what the context leaves.", ge=1
    )
    extra_body: dict[str, Any] = opt(factory=dict, doc="Further keys of each request to the engine.")


@dataclass
class RolloutConfig:
    """How rollouts become batches."""

    batch_size: int = opt(128, "Rollouts per training step.", ge=1)
    group_size: int = opt(8, "Rollouts per task; most algorithms compare them, so 1 earns nothing.", ge=1)
    max_off_policy_steps: int = opt(8, "Oldest policy version trained on, in steps behind the batch.", ge=0)
    max_inflight: int | None = opt(
        None,
        "Rollouts in flight at most; null = what the engines' memory holds, if they tell, else `batch_size`.",
        ge=1,
    )
    min_inflight: int = opt(1, "Rollouts in flight at least, however loaded the engines are.", ge=1)
    initial_inflight: int | None = opt(
        None, "Rollouts in flight at first; null = what the engines' memory holds, else `batch_size`.", ge=1
    )
    tasks_per_minute: float | None = opt(None, "Tasks (groups) started per minute at most.", gt=0)
    max_fruitless_batches: int | None = opt(
        10,
        "End the run after so many batches' worth of finished rollouts without credit; null = never.",
        ge=1,
    )
    transport: str = opt(
        "zmq",
        "How batches reach the trainer: a socket, or files in the run directory.",
        choices=("zmq", "filesystem"),
    )
    constant_batch_size: bool = opt(
        True, "Refill a batch that lost rollouts without credit; false = shrink it."
    )
    sampling: RolloutSamplingConfig = opt(factory=RolloutSamplingConfig, doc="Sampling of training rollouts.")


LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass
class LogConfig:
    """What the terminal and the log files show."""

    level: str = opt("info", "Log level.", choices=LOG_LEVELS)
    levels: dict[str, str] = opt(
        factory=dict, doc="Levels of single processes, by kind or name: `{trainer: debug}`."
    )
    format: str = opt(
        "text",
        "Lines as text, or one flat JSON object each: in log files, and on a terminal without a live table.",
        choices=("text", "json"),
    )
    display: str = opt(
        "auto",
        "Live table, plain lines, or nothing; auto = live on a terminal.",
        choices=("auto", "live", "plain", "none"),
    )


@dataclass
class RlConfig:
    """`prl rl`: asynchronous reinforcement learning."""

    algo: Any = opt(doc="Which credit a rollout earns.")
    loss: Any = opt(doc="Trust region of every policy-gradient token.")
    model: training.ModelConfig = opt(factory=training.ModelConfig, doc="The policy.")
    env: dict[str, sources.EnvConfig] = opt(factory=dict, doc="Environments by name.")
    curriculum: Any = opt(doc="Which task comes next.")
    rollout: RolloutConfig = opt(factory=RolloutConfig, doc="How rollouts become batches.")
    eval: evals.OnlineEvalConfig = opt(factory=evals.OnlineEvalConfig, doc="Evaluations while training.")
    optim: Any = opt(doc="Optimizer.")
    scheduler: Any = opt(doc="Learning-rate schedule.")
    zero: training.ZeroConfig = opt(factory=training.ZeroConfig, doc="DeepSpeed ZeRO.")
    lora: training.LoraConfig = opt(factory=training.LoraConfig, doc="Low-rank adapters.")
    trainer: training.TrainerConfig = opt(factory=training.TrainerConfig, doc="The training step.")
    inference: Any = opt(doc="Which engine samples.")
    sync: serving.SyncConfig = opt(factory=serving.SyncConfig, doc="How weights reach the engines.")
    cluster: serving.ClusterConfig = opt(factory=serving.ClusterConfig, doc="Where processes run.")
    ckpt: training.CkptConfig = opt(factory=training.CkptConfig, doc="Checkpoints.")
    tracking: Any = opt(doc="Where metrics go.")
    monitor: serving.MonitorConfig = opt(factory=serving.MonitorConfig, doc="Health from outside.")
    run: RunConfig = opt(factory=RunConfig, doc="Identity of the run.")
    log: LogConfig = opt(factory=LogConfig, doc="What is shown.")
    env_vars: EnvVarsConfig = opt(factory=EnvVarsConfig, doc="Environment variables.")
    max_steps: int | None = opt(
        30, "Last step (absolute, also on resume); null = forever. A first run shall end by itself.", ge=1
    )
    seed: int = opt(0, "Seed of initialisation, tasks and sampling.", ge=0, lt=2**31)
    output_dir: str = opt("outputs", "Parent of all runs.")
    dry_run: bool = opt(False, "Print what would run, start nothing, write nothing.")


@dataclass
class SftConfig:
    """`prl sft`: supervised fine-tuning on the trainer of `prl rl`."""

    data: Any = opt(doc="Training data.")
    val: ValConfig = opt(factory=ValConfig, doc="Validation.")
    eval: evals.OnlineEvalConfig = opt(factory=evals.OnlineEvalConfig, doc="Evaluations while training.")
    inference: Any = opt(doc="Which engine samples for evaluations; none is started without `eval.env`.")
    sync: serving.SyncConfig = opt(factory=serving.SyncConfig, doc="How weights reach that engine.")
    model: training.ModelConfig = opt(factory=training.ModelConfig, doc="The model.")
    optim: Any = opt(doc="Optimizer.")
    scheduler: Any = opt(doc="Learning-rate schedule.")
    zero: training.ZeroConfig = opt(factory=training.ZeroConfig, doc="DeepSpeed ZeRO.")
    lora: training.LoraConfig = opt(factory=training.LoraConfig, doc="Low-rank adapters.")
    trainer: training.TrainerConfig = opt(factory=training.TrainerConfig, doc="The training step.")
    cluster: serving.ClusterConfig = opt(factory=serving.ClusterConfig, doc="Where processes run.")
    ckpt: training.CkptConfig = opt(factory=training.CkptConfig, doc="Checkpoints.")
    tracking: Any = opt(doc="Where metrics go.")
    monitor: serving.MonitorConfig = opt(factory=serving.MonitorConfig, doc="Health from outside.")
    export: SftExportConfig = opt(factory=SftExportConfig, doc="The result as a model directory.")
    run: RunConfig = opt(factory=RunConfig, doc="Identity of the run.")
    log: LogConfig = opt(factory=LogConfig, doc="What is shown.")
    env_vars: EnvVarsConfig = opt(factory=EnvVarsConfig, doc="Environment variables.")
    max_steps: int | None = opt(250, "Last step (absolute, also on resume).", ge=1)
    seed: int = opt(0, "Seed of initialisation and data order.", ge=0, lt=2**31)
    output_dir: str = opt("outputs", "Parent of all runs.")
    dry_run: bool = opt(False, "Print what would run, start nothing, write nothing.")


@dataclass
class EvalRolloutConfig:
    """Rollouts of an evaluation. An environment's own values win, field by field."""

    group_size: int = opt(1, "Rollouts per task.", ge=1)
    sampling: sources.SamplingConfig = opt(
        factory=sources.SamplingConfig, doc="Sampling of every environment; null = left to the engine."
    )


@dataclass
class EvalClientConfig:
    """The endpoint of `inference=external`, which speaks OpenAI's chat completions."""

    base_url: str | None = opt(None, "URL ending in /v1; null = prl serves the model itself.")
    api_key_var: str = opt("PRL_API_KEY", "Name of the environment variable that holds the key.")
    headers: dict[str, str] = opt(factory=dict, doc="Extra HTTP headers.")
    timeout: float = opt(30.0, "Seconds that the first question (which models are there) may take.", gt=0)


@dataclass
class EvalSharedConfig:
    """What every environment gets beneath its own options, key by key."""

    taskset: dict[str, Any] = opt(factory=dict, doc="Options of every taskset.")
    agents: dict[str, Any] = opt(factory=dict, doc="Options per agent.")


@dataclass
class EvalRulesConfig:
    """How an evaluation deals with faults, and how it counts."""

    errors: str = opt(
        "skip", "A rollout that failed enters no mean, or counts as reward 0.", choices=("skip", "zero")
    )
    retries: int = opt(4, "Times that a rollout is repeated after 429, 5xx or a lost connection.", ge=0)
    backoff: float = opt(1.0, "Seconds before the first repetition; doubles each time.", ge=0)
    max_backoff: float = opt(60.0, "Longest such pause, seconds.", ge=0)
    rollouts_per_minute: float | None = opt(None, "Rollouts started per minute at most.", gt=0)
    resamples: int = opt(2000, "Bootstrap resamples behind each interval.", ge=100)


@dataclass
class EvalConfig:
    """`prl eval`: any model on many environments."""

    env: dict[str, sources.EnvConfig] = opt(factory=dict, doc="Environments by name.")
    model: training.ModelConfig = opt(factory=training.ModelConfig, doc="The model.")
    steps: list[Any] = opt(
        factory=list, doc="Checkpoints of the run `model.path`, as [10,20,final]; empty = its weights."
    )
    checkpoints: str | None = opt(None, "Run directory that `steps` speaks of; null = `model.path`.")
    select: sources.SelectConfig = opt(factory=sources.SelectConfig, doc="Which tasks of each environment.")
    rollout: EvalRolloutConfig = opt(factory=EvalRolloutConfig, doc="Rollouts.")
    shared: EvalSharedConfig = opt(factory=EvalSharedConfig, doc="Options that all environments share.")
    concurrency: int = opt(128, "Rollouts in flight.", ge=1)
    eval: EvalRulesConfig = opt(factory=EvalRulesConfig, doc="Faults and statistics.")
    client: EvalClientConfig = opt(factory=EvalClientConfig, doc="The endpoint of `inference=external`.")
    inference: Any = opt(doc="Which engine samples.")
    cluster: serving.ClusterConfig = opt(factory=serving.ClusterConfig, doc="Where processes run.")
    tracking: Any = opt(doc="Where metrics go.")
    monitor: serving.MonitorConfig = opt(factory=serving.MonitorConfig, doc="Health from outside.")
    run: RunConfig = opt(factory=RunConfig, doc="Identity of the run.")
    log: LogConfig = opt(factory=LogConfig, doc="What is shown.")
    env_vars: EnvVarsConfig = opt(factory=EnvVarsConfig, doc="Environment variables.")
    seed: int = opt(0, "Seed of tasks, sampling and bootstrap.", ge=0, lt=2**31)
    output_dir: str = opt("outputs", "Parent of all runs.")
    dry_run: bool = opt(False, "Print what would run, start nothing, write nothing.")


@dataclass
class ExportConfig:
    """`prl export`: a checkpoint as safetensors that `from_pretrained` loads."""

    run: str = opt(doc="Run directory or checkpoint directory.")
    step: int | None = opt(None, "Step to export; null = the newest complete one.", ge=1)
    out: str | None = opt(None, "Where to write; null = `weights/` in the checkpoint.")
    dtype: str = opt("float32", "Type of the exported weights.", choices=("float32", "bfloat16", "float16"))
    shard_bytes: int = opt(5_000_000_000, "Largest file, bytes.", ge=1)
    merge: bool = opt(True, "Adapters: write whole weights with them merged in; false = the adapter alone.")
    register: str | None = opt(
        None, "Registered model of the run's MLflow store that gets the weights as a version; null = none."
    )
    cluster: serving.ClusterConfig = opt(factory=serving.ClusterConfig, doc="Where it runs.")
    dry_run: bool = opt(False, "Print what would run, start nothing, write nothing.")


@dataclass
class InferenceJobConfig:
    """`prl inference`: a model behind the routes that training and evaluation use."""

    model: training.ModelConfig = opt(factory=training.ModelConfig, doc="The model.")
    inference: Any = opt(doc="Which engine serves it.")
    dtype: str = opt(
        "auto",
        "Type of the weights; auto = bfloat16 on GPUs, float32 on CPUs.",
        choices=("auto", "float32", "bfloat16"),
    )
    sync: serving.SyncConfig = opt(factory=serving.SyncConfig, doc="How weights reach the engines.")
    cluster: serving.ClusterConfig = opt(factory=serving.ClusterConfig, doc="Where processes run.")
    run: RunConfig = opt(factory=RunConfig, doc="Identity of the server's directory.")
    log: LogConfig = opt(factory=LogConfig, doc="What is shown.")
    env_vars: EnvVarsConfig = opt(factory=EnvVarsConfig, doc="Environment variables.")
    seed: int = opt(0, "Seed of sampling.", ge=0)
    output_dir: str = opt("outputs", "Parent of all runs.")
    dry_run: bool = opt(False, "Print what would run, start nothing, write nothing.")


JOBS: dict[str, type] = {
    "rl": RlConfig,
    "sft": SftConfig,
    "eval": EvalConfig,
    "export": ExportConfig,
    "inference": InferenceJobConfig,
}

GROUPS: dict[str, dict[str, type]] = {
    "algo": {
        "grpo": algo.GrpoConfig,
        "max_rl": algo.MaxRlConfig,
        "rae": algo.RaeConfig,
        "hierarchical_grpo": algo.HierarchicalGrpoConfig,
        "opd": algo.OpdConfig,
        "opsd": algo.OpsdConfig,
        "sft": algo.SftAlgoConfig,
        "echo": algo.EchoConfig,
    },
    "loss": {
        "ipo": loss.IpoConfig,
        "icepop": loss.IcePopConfig,
        "ppo": loss.PpoConfig,
        "cispo": loss.CispoConfig,
        "custom": loss.CustomLossConfig,
    },
    "optim": {
        "adamw": training.AdamWConfig,
        "sgd": training.SgdConfig,
        "muon": training.MuonConfig,
        "sign_sgd": training.SignSgdConfig,
    },
    "scheduler": {
        "constant": training.SchedulerConfig,
        "linear": training.LinearConfig,
        "cosine": training.CosineConfig,
    },
    "inference": {
        "embedded": serving.EmbeddedConfig,
        "vllm": serving.VllmConfig,
        "external": serving.ExternalConfig,
    },
    "sync": {"filesystem": serving.SyncConfig, "collective": serving.CollectiveConfig},
    "cluster": {"local": serving.ClusterConfig, "slurm": cluster.SlurmConfig},
    "tracking": {"none": serving.TrackingConfig, "mlflow": serving.MlflowConfig},
    "data": {
        "warm_start": WarmStartDataConfig,
        "rows": RowsDataConfig,
        "reverse_text": RowsDataConfig,
        "instructions": RowsDataConfig,
        "tool_calls": RowsDataConfig,
        "fake": FakeDataConfig,
    },
    "curriculum": {
        "standard": curriculum.StandardConfig,
        "difficulty_pool": curriculum.DifficultyPoolConfig,
    },
}
"""Group -> `name` of the node -> its schema."""
