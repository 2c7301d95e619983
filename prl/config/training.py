"""Schema of the trainer's groups: model, optim, scheduler, zero, trainer, ckpt."""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.fields import opt


@dataclass
class ModelConfig:
    """The policy: weights, tokenizer and how messages become tokens."""

    name: str = opt(doc="Name under which engines serve the policy.")
    path: str | None = opt(
        None,
        "Directory with Hugging Face weights and tokenizer, a run directory, or null for the bundled ones.",
    )
    renderer: str = opt(
        "auto", "How messages become tokens: auto, a family name of `renderers`, or `package.module:Class`."
    )
    teacher: str | None = opt(None, "Frozen model that algo=opd and algo=sft take if they name none.")
    random_init: bool = opt(False, "Ignore the weights and initialise at random (plumbing tests).")
    num_layers: int | None = opt(None, "Keep only the first layers (plumbing tests).", ge=1)


@dataclass
class OptimConfig:
    """What every optimizer has."""

    name: str = opt(doc="Name of the optimizer.")
    lr: float = opt(1e-6, "Peak learning rate.", ge=0)
    weight_decay: float = opt(
        0.0, "Decoupled weight decay; it would pull trained weights away from where they are.", ge=0
    )
    max_norm: float | None = opt(1.0, "Clip the global gradient norm to this; null = never clip.", gt=0)


@dataclass
class AdamWConfig(OptimConfig):
    """AdamW with float32 master weights and moments."""

    name: str = "adamw"
    betas: list[float] = opt(factory=lambda: [0.9, 0.999], doc="Decay of the two moments.", ge=0, lt=1)
    eps: float = opt(1e-8, "Added to the denominator.", gt=0)


@dataclass
class SgdConfig(OptimConfig):
    """Momentum SGD."""

    name: str = "sgd"
    momentum: float = opt(0.9, "Momentum.", ge=0, lt=1)
    nesterov: bool = opt(True, "Nesterov momentum.")


@dataclass
class MuonConfig(OptimConfig):
    """Muon on hidden matrices, AdamW on everything else."""

    name: str = "muon"
    momentum: float = opt(0.95, "Momentum of the matrices.", ge=0, lt=1)
    adam_lr: float | None = opt(None, "Learning rate of the rest; null = `lr`.", ge=0)
    betas: list[float] = opt(factory=lambda: [0.9, 0.95], doc="AdamW moments of the rest.", ge=0, lt=1)
    eps: float = opt(1e-8, "Added to the denominator.", gt=0)


@dataclass
class SignSgdConfig(OptimConfig):
    """Stateless: moves each weight by the sign of its gradient."""

    name: str = "sign_sgd"


@dataclass
class SchedulerConfig:
    """Constant learning rate."""

    name: str = "constant"


@dataclass
class LinearConfig(SchedulerConfig):
    """Warm up, stay, decay (needs `max_steps` when it decays)."""

    name: str = "linear"
    warmup_steps: int = opt(10, "Steps from near 0 to the peak.", ge=0)
    decay_steps: int = opt(10, "Last steps, down to `min_lr`.", ge=0)
    min_lr: float = opt(0.0, "Lowest learning rate.", ge=0)


@dataclass
class CosineConfig(SchedulerConfig):
    """Warm up, then half a cosine to `max_steps`."""

    name: str = "cosine"
    warmup_steps: int = opt(10, "Steps from near 0 to the peak.", ge=0)
    min_lr: float = opt(0.0, "Lowest learning rate.", ge=0)


@dataclass
class ZeroConfig:
    """DeepSpeed ZeRO: what is sharded over the trainer ranks."""

    stage: int = opt(
        1,
        "0 nothing, 1 optimizer, 2 + gradients, 3 + parameters; 1 is the fastest that shards.",
        choices=(0, 1, 2, 3),
    )
    offload_optimizer: bool = opt(False, "Keep optimizer state in host memory (stages 1 to 3).")
    offload_parameters: bool = opt(False, "Keep parameters in host memory (stage 3).")
    param_persistence_threshold: int = opt(100_000, "Stage 3 keeps smaller parameters whole.", ge=0)
    hpz_partition_size: int = opt(1, "ZeRO++ secondary partition, ranks (stage 3).", ge=1)


EXPERTS = "experts"
"""Among `lora.targets`: every projection of every expert of a mixture."""


@dataclass
class LoraConfig:
    """Low-rank adapters: W + alpha / rank * B A, only A and B are trained."""

    rank: int = opt(0, "Rank of the adapters; 0 = none, every weight is trained.", ge=0)
    alpha: float = opt(32.0, "Scale of an adapter times its rank.", gt=0)
    dropout: float = opt(0.0, "Dropout in front of the adapters.", ge=0, lt=1)
    targets: list[str] = opt(
        factory=lambda: [
            *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            EXPERTS,
        ],
        doc="Names of the linear layers that get one; experts = the three projections of each expert; those "
        "that the model lacks are ignored.",
    )
    modules_to_save: list[str] = opt(
        factory=list,
        doc="Other modules that are trained in full and saved with the adapters: lm_head, embed_tokens, …",
    )
    publish: str = opt(
        "merged",
        "What engines get: whole weights with the adapters in them, or the adapters alone (PEFT's format), "
        "if none is of experts.",
        choices=("merged", "adapter"),
    )


@dataclass
class TrainerConfig:
    """The training step."""

    seq_len: int = opt(2048, "Tokens of a packed row; longer samples are cut and counted.", ge=2)
    lm_head_chunk: int = opt(8192, "Tokens per chunk of the LM head; 0 = whole rows.", ge=0)
    attn: str = opt("auto", "Attention kernel.", choices=("auto", "sdpa", "flex", "flash"))
    dtype: str = opt(
        "auto",
        "Compute type; auto = bfloat16 on GPUs, float32 on CPUs.",
        choices=("auto", "float32", "bfloat16"),
    )
    recompute: str = opt(
        "none",
        "Computed again in backward: nothing, the feed-forward parts (keeps attention), or whole layers.",
        choices=("none", "selective", "full"),
    )
    offload_activations: bool = opt(
        False, "Keep what recomputation starts from in host memory (needs `recompute`)."
    )
    compile: bool = opt(False, "torch.compile each layer.")
    sequence_parallel: int = opt(
        1, "Ranks that share each row, for rows that one device cannot hold (DeepSpeed-Ulysses).", ge=1
    )
    threads: int = opt(1, "CPU threads of each trainer rank.", ge=1)
    gc_interval: int | None = opt(
        50, "Collect garbage every so many steps, and only then; null = when Python likes.", ge=1
    )
    dist_timeout: float = opt(3600.0, "Seconds a collective may take.", gt=0)


@dataclass
class CkptConfig:
    """Checkpoints. Complete ones carry a marker that is written last."""

    interval: int | None = opt(None, "Save every so many steps; null = never in between.", ge=1)
    at_end: bool = opt(False, "Save after the last step.")
    keep_last: int | None = opt(None, "Keep the newest so many; null = all.", ge=1)
    keep_interval: int | None = opt(None, "Also keep multiples of this step.", ge=1)
    dir: str | None = opt(None, "Where checkpoints go; null = `checkpoints/` of the run directory.")
    async_save: bool = opt(False, "Write from a copy in host memory while training goes on.")
    skip_optimizer: bool = opt(False, "On resume, start with a fresh optimizer.")
    skip_scheduler: bool = opt(False, "On resume, start the schedule anew.")
    skip_progress: bool = opt(False, "On resume, forget counters and the position in the tasks.")
