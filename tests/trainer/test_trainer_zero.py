"""DeepSpeed's configuration leaves nothing to defaults that change the training."""

from __future__ import annotations

import pytest
import torch

from prl.config.training import AdamWConfig, MuonConfig, OptimConfig, ZeroConfig
from prl.trainer.zero import check_zero, deepspeed_config, effective_stage

FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_clipping_is_written_out(stage: int) -> None:
    """DeepSpeed clips to 1.0 where the key is absent."""
    config = deepspeed_config(ZeroConfig(stage=stage), AdamWConfig(max_norm=None), FP32, on_gpu=False)
    assert config["gradient_clipping"] == 0.0


def test_clipping_is_deepspeeds_from_stage_1_on() -> None:
    values = [
        deepspeed_config(ZeroConfig(stage=stage), AdamWConfig(max_norm=0.3), FP32, on_gpu=False)[
            "gradient_clipping"
        ]
        for stage in range(4)
    ]
    assert values == [0.0, 0.3, 0.3, 0.3]


def test_stage_0_in_bfloat16_becomes_1() -> None:
    assert effective_stage(ZeroConfig(stage=0), BF16) == 1
    assert [effective_stage(ZeroConfig(stage=s), BF16) for s in (1, 2, 3)] == [1, 2, 3]
    assert effective_stage(ZeroConfig(stage=0), FP32) == 0
    config = deepspeed_config(ZeroConfig(stage=0), AdamWConfig(max_norm=0.3), BF16, on_gpu=True)
    assert config["zero_optimization"]["stage"] == 1 and config["gradient_clipping"] == 0.3


def test_gradients_are_averaged_in_float32_and_the_caller_accumulates() -> None:
    for dtype in (FP32, BF16):
        config = deepspeed_config(ZeroConfig(stage=2), AdamWConfig(), dtype, on_gpu=True)
        assert config["gradient_allreduce_op"] == "mean"
        assert config["communication_data_type"] == "fp32"
        assert config["managed_gradient_accumulation"] is False
        assert config["gradient_accumulation_steps"] == 1
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_goes_with_any_torch_optimizer(stage: int) -> None:
    config = deepspeed_config(
        ZeroConfig(stage=stage, offload_optimizer=True), AdamWConfig(), FP32, on_gpu=False
    )
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": False}
    assert config["zero_force_ds_cpu_optimizer"] is False


def test_stage_3_keys_reach_deepspeed() -> None:
    zero = ZeroConfig(stage=3, offload_parameters=True, param_persistence_threshold=7, hpz_partition_size=2)
    section = deepspeed_config(zero, AdamWConfig(), FP32, on_gpu=True)["zero_optimization"]
    assert section["stage3_param_persistence_threshold"] == 7
    assert section["zero_hpz_partition_size"] == 2
    assert section["offload_param"] == {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_overlap_is_off_where_it_would_break_accumulation(stage: int) -> None:
    section = deepspeed_config(ZeroConfig(stage=stage), AdamWConfig(), BF16, on_gpu=True)["zero_optimization"]
    assert section["overlap_comm"] is (stage >= 2)


@pytest.mark.parametrize(
    ("zero", "optim", "words"),
    [
        (ZeroConfig(stage=0, offload_optimizer=True), AdamWConfig(), "offload_optimizer"),
        (ZeroConfig(stage=2, offload_parameters=True), AdamWConfig(), "needs zero.stage=3"),
        (ZeroConfig(stage=1, hpz_partition_size=2), AdamWConfig(), "hpz_partition_size=2"),
        (ZeroConfig(stage=1, offload_optimizer=True), MuonConfig(), "optim=adamw"),
    ],
)
def test_bad_combinations_are_refused(zero: ZeroConfig, optim: OptimConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_zero(zero, optim)
