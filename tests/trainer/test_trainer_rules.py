"""What the configuration refuses about adapters and activation memory, with a remedy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors
from prl.config.training import AdamWConfig, TrainerConfig, ZeroConfig
from prl.trainer.recompute import check_compiler, prepare_layers
from prl.trainer.zero import deepspeed_config

FULL = "trainer.recompute=full"
OFFLOAD = "trainer.offload_activations=true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([OFFLOAD], "trainer.offload_activations = true: nothing is computed again"),
        ([OFFLOAD, "trainer.recompute=selective", "trainer.compile=true"], "layers would fall apart"),
        (["lora=r16", "lora.targets=[]"], "no layer would get an adapter"),
        (["lora=r8", "model.random_init=true", "ckpt=end"], "random weights beneath them would be lost"),
        (["lora=r8", "lora.publish=full"], "lora.publish"),
        (["lora.modules_to_save=[lm_head]"], "without adapters every module is trained"),
        (
            ["lora=r8", "lora.modules_to_save=[lm_head]", "lora.publish=adapter"],
            "take no other weights with them",
        ),
        (["lora=r8", "lora.modules_to_save=[q_proj]"], "q_proj is in lora.targets too"),
        (["lora=r8", "lora.dropout=1"], "lora.dropout"),
    ],
)
def test_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors, match=message):
        compose_job("rl", words)


@pytest.mark.parametrize("command", ["rl", "sft"])
def test_accepted(command: str) -> None:
    config = compose_job(command, ["lora=r16", OFFLOAD, FULL])
    assert (config.lora.rank, config.lora.alpha, config.lora.publish) == (16, 32.0, "merged")
    assert compose_job(command, []).lora.rank == 0
    assert compose_job(command, ["lora=r64"]).lora.alpha == 128.0


def test_adapters_of_experts_are_published_merged(tmp_path: Path) -> None:
    """Only a model that has experts is meant, and only an engine that would get them."""
    words = ["lora=r8", "lora.publish=adapter", f"model.path={tmp_path}"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigErrors, match=r"lora\.publish = adapter: the experts of this model") as refused:
        compose_job("rl", words)
    assert "Set lora.publish=merged, or leave experts out of lora.targets" in str(refused.value)
    assert compose_job("rl", [*words, "lora.targets=[q_proj]"]).lora.publish == "adapter"
    assert compose_job("sft", words).lora.publish == "adapter"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert compose_job("rl", words).lora.targets[-1] == "experts"


def test_whole_layers_are_compiled_and_offloaded_together() -> None:
    assert compose_job("rl", [OFFLOAD, FULL, "trainer.compile=true", "zero=3"]).trainer.offload_activations


def test_compilation_needs_a_compiler_on_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(
        ValueError, match=r"trainer\.compile=true: .* C\+\+ compiler.*name another in the variable CXX"
    ):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
    monkeypatch.setenv("CXX", sys.executable)
    check_compiler(torch.device("cpu"))


def test_models_without_the_usual_layers_are_refused() -> None:
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="Linear has no layers that can be recomputed"):
        prepare_layers(plain, TrainerConfig(recompute="full"))
    with pytest.raises(ValueError, match="no layers"):
        prepare_layers(plain, TrainerConfig(compile=True))
    prepare_layers(plain, TrainerConfig())


def test_gradients_leave_bfloat16_at_once() -> None:
    """Otherwise all of them live until the step, beside the float32 sums that hold the same."""
    bf16 = deepspeed_config(ZeroConfig(stage=1), AdamWConfig(), torch.bfloat16, on_gpu=True)["bf16"]
    assert bf16 == {"enabled": True, "immediate_grad_update": True}
