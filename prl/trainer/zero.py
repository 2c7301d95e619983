"""DeepSpeed's configuration, written out in full wherever its defaults would change the training."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prl.config.training import MuonConfig, OptimConfig, ZeroConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def effective_stage(zero: ZeroConfig, dtype: torch.dtype) -> int:
    """The ZeRO stage that really runs.

    Stage 0 with bfloat16 becomes 1: DeepSpeed's stage 0 makes one optimizer step with zero gradients while it
    is built, which spoils Adam's bias correction for good.
    """
    return 1 if zero.stage == 0 and dtype == torch.bfloat16 else zero.stage


def check_zero(zero: ZeroConfig, optim: OptimConfig) -> None:
    """Raises ValueError for combinations that DeepSpeed does not do or does wrongly."""
    if zero.offload_optimizer and zero.stage == 0:
        raise ValueError("zero.offload_optimizer=true needs zero.stage of 1 to 3; use zero=1")
    if zero.offload_parameters and zero.stage != 3:
        raise ValueError(f"zero.offload_parameters=true needs zero.stage=3, not {zero.stage}; use zero=3")
    if zero.hpz_partition_size > 1 and zero.stage != 3:
        raise ValueError(f"zero.hpz_partition_size={zero.hpz_partition_size} needs zero.stage=3; use zero=3")
    if isinstance(optim, MuonConfig) and zero.offload_optimizer:
        raise ValueError(
            "optim=muon works on the device; set zero.offload_optimizer=false or use optim=adamw"
        )


def deepspeed_config(
    zero: ZeroConfig, optim: OptimConfig, dtype: torch.dtype, *, on_gpu: bool
) -> dict[str, Any]:
    """The whole configuration of the DeepSpeed engine.

    Gradients are averaged over ranks (the only rule that all stages have), accumulated and reduced in
    float32; the caller owns the accumulation boundary. At stage 0 the trainer clips by itself, because
    DeepSpeed reports no norm there.
    """
    stage = effective_stage(zero, dtype)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,
        "gradient_allreduce_op": "mean",
        "gradient_clipping": 0.0 if stage == 0 else optim.max_norm or 0.0,
        "communication_data_type": "fp32",
        "zero_optimization": _zero_section(zero, stage, on_gpu),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if dtype == torch.bfloat16:
        # At stage 1 each gradient moves into the float32 sum as soon as it is there, and its memory is free.
        config |= {
            "bf16": {"enabled": True, "immediate_grad_update": True},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    return config


def shard_as_built(settings: dict[str, Any], dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Within it a module's parameters are sharded over the ranks as soon as it exists (stage 3)."""
    import deepspeed

    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    return deepspeed.zero.Init(config_dict_or_path=settings, dtype=dtype)


def initialise_shards(policy: PreTrainedModel, seed: int) -> None:
    """Random weights from `seed` for a model of `shard_as_built`, whole for one module at a time. Collective.

    They are drawn in another order than for a model that is built whole. A weight that two modules have is
    the first one's: an embedding zeroes its padding row, a head would not.
    """
    import deepspeed

    drawn: set[int] = set()

    def initialise(module: nn.Module) -> None:
        own = [p for p in module.parameters(recurse=False) if id(p) not in drawn]
        drawn.update(map(id, own))
        if own:
            with deepspeed.zero.GatheredParameters(own, modifier_rank=0), torch.no_grad():
                policy._init_weights(module)

    torch.manual_seed(seed)
    policy.apply(initialise)


def _zero_section(zero: ZeroConfig, stage: int, on_gpu: bool) -> dict[str, Any]:
    # Overlap and caller-owned accumulation go together at stages 2 and 3 only. Pinned memory is a GPU matter.
    section: dict[str, Any] = {"stage": stage, "overlap_comm": on_gpu and stage >= 2}
    host = {"device": "cpu", "pin_memory": on_gpu}
    if zero.offload_optimizer:
        section["offload_optimizer"] = host
    if stage == 3:
        section["stage3_param_persistence_threshold"] = zero.param_persistence_threshold
        section["zero_hpz_partition_size"] = zero.hpz_partition_size
        # DeepSpeed's own linear function, put in torch's place, makes compiled layers differ from each other.
        section["memory_efficient_linear"] = False
        if zero.offload_parameters:
            section["offload_param"] = host
    return section
