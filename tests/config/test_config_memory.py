"""The memory estimate against counts that were made otherwise."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.dry_run import driver_bytes, host_bytes, placement_report
from launchers.placement import place
from prl.assets import bundled_model
from prl.config.memory import GB, Need, Sizes, engine_need, memory_report, read_sizes, trainer_need

QWEN3_0_6B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "tie_word_embeddings": True,
}
QWEN3_4B = {
    **QWEN3_0_6B,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
}
LLAMA_3_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
}


def sizes_of(table: dict[str, Any], where: Path, **more: Any) -> Sizes:
    (where / "config.json").write_text(json.dumps({**table, **more}))
    found = read_sizes(where)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("table", "published"),
    [(QWEN3_0_6B, 596_049_920), (LLAMA_3_8B, 8_030_261_248), (QWEN3_30B_A3B, 30_532_122_624)],
)
def test_parameters_are_those_that_were_published(table, published: int, tmp_path: Path) -> None:
    assert sizes_of(table, tmp_path).parameters == published


def test_parameters_of_the_bundled_model_are_those_in_its_file() -> None:
    directory = bundled_model("tiny")
    raw = (directory / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    count = 0
    for name, entry in header.items():
        if name != "__metadata__":
            size = 1
            for side in entry["shape"]:
                size *= side
            count += size
    found = read_sizes(directory)
    assert found is not None and found.parameters == count


def test_a_model_that_names_no_sizes_has_no_estimate(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    assert read_sizes(tmp_path) is None


def test_text_part_and_cut_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": QWEN3_0_6B}))
    whole, cut = read_sizes(tmp_path), read_sizes(tmp_path, 14)
    assert whole is not None and cut is not None
    assert whole.parameters - cut.parameters == 14 * 15_730_944


def needs(rl, sizes: Sizes, *words: str, on_gpu: bool = True) -> Need:
    return trainer_need(rl(*words), sizes, on_gpu)


def test_bytes_per_parameter_follow_the_stage(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    million = sizes.parameters
    ranks = "cluster.train_ranks=4"
    for stage, parameters, gradients, optimizer in ((1, 2, 4, 3), (2, 2, 1, 3), (3, 0.5, 1, 3)):
        need = needs(rl, sizes, f"zero={stage}", ranks)
        assert (need.parameters, need.gradients, need.optimizer) == (
            parameters * million,
            gradients * million,
            optimizer * million,
        )
    whole = needs(rl, sizes, "zero=0", on_gpu=False)
    assert (whole.parameters, whole.gradients, whole.optimizer) == (4 * million, 4 * million, 8 * million)
    assert needs(rl, sizes, "optim=sign_sgd", "zero=1").optimizer == 4 * million
    assert needs(rl, sizes, "optim=sgd", "zero=1").optimizer == 8 * million


def test_offloading_moves_bytes_to_the_host(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    need = needs(rl, sizes, "zero=3", "zero.offload_optimizer=true", "zero.offload_parameters=true")
    assert (need.parameters, need.optimizer, need.host) == (0, 0, 14 * sizes.parameters)


def test_activations_shrink_with_recomputation_and_grow_with_rows(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    logits = 512 * 8192 * 20
    levels = ("none", "selective", "full")
    found = [needs(rl, sizes, f"trainer.recompute={level}").activations - logits for level in levels]
    assert found == sorted(found, reverse=True) and found[0] > 5 * found[2]
    double = needs(rl, sizes, "trainer.seq_len=1024", "trainer.lm_head_chunk=512").activations - logits
    single = needs(rl, sizes, "trainer.seq_len=512").activations - logits
    assert double == 2 * single
    shared = needs(rl, sizes, "cluster.train_ranks=2", "trainer.sequence_parallel=2").activations
    assert shared - logits == found[0] / 2


@pytest.mark.parametrize(
    ("shape", "tokens", "recompute", "words", "measured"),
    [
        (QWEN3_0_6B, 8192, "none", [], 20.5),
        (QWEN3_0_6B, 8192, "full", [], 11.3),
        (QWEN3_0_6B, 16384, "none", [], 30.2),
        (QWEN3_0_6B, 16384, "full", [], 12.2),
        (QWEN3_0_6B, 65536, "none", [], 88.7),
        (QWEN3_0_6B, 65536, "full", [], 17.6),
        (QWEN3_4B, 16384, "full", [], 73.1),
        (QWEN3_4B, 16384, "selective", [], 98.4),
        (QWEN3_0_6B, 16384, "full", ["zero=2"], 14.7),
        (QWEN3_0_6B, 16384, "full", ["zero=1", "cluster.train_ranks=2"], 8.8),
        (QWEN3_0_6B, 16384, "full", ["zero=2", "cluster.train_ranks=2"], 10.2),
        (QWEN3_0_6B, 16384, "full", ["zero=3"], 12.5),
        (QWEN3_0_6B, 16384, "full", ["zero=3", "cluster.train_ranks=2"], 8.5),
        (QWEN3_4B, 16384, "full", ["zero=3"], 73.4),
    ],
)
def test_the_estimate_is_near_what_was_measured_on_a_gpu(
    rl, tmp_path: Path, shape: dict[str, Any], tokens: int, recompute: str, words: list[str], measured: float
) -> None:
    """Peaks in GiB of `prl bench trainer compile=true`, from examples/benchmarks.md."""
    words = [*words, f"trainer.seq_len={tokens}", f"trainer.recompute={recompute}", "trainer.compile=true"]
    need = needs(rl, sizes_of(shape, tmp_path), *words)
    assert need.device / 2**30 == pytest.approx(measured, rel=0.03)


def kept_by_autograd(shape: dict[str, int], dtype: Any) -> int:
    """Bytes that a forward pass of 64 tokens leaves for backward, parameters aside."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=64, attn_implementation="sdpa", **shape)).to(dtype)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.model(input_ids=torch.arange(64)[None])
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "changed", [{}, {"hidden_size": 128}, {"intermediate_size": 512}, {"num_attention_heads": 8}]
)
def test_a_layer_keeps_what_autograd_says(tmp_path: Path, dtype: str, changed: dict[str, int]) -> None:
    import torch

    shape = {
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    } | changed
    one, two = (kept_by_autograd({**shape, "num_hidden_layers": n}, getattr(torch, dtype)) for n in (1, 2))
    width = 2 if dtype == "bfloat16" else 4
    table = {**shape, "model_type": "qwen3", "num_hidden_layers": 1, "vocab_size": 64}
    counted = sum(sizes_of(table, tmp_path).layer_activations(width, compiled=False))
    assert counted * 64 * width == pytest.approx(two - one, rel=0.05)


def test_the_heads_block_is_the_trainers() -> None:
    from prl.config.memory import HEAD_BLOCK
    from prl.trainer.lm_head import VOCAB_BLOCK

    assert HEAD_BLOCK == VOCAB_BLOCK


def test_the_buckets_are_deepspeeds() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    from prl.config.memory import REDUCE_BUCKET

    assert DeepSpeedZeroConfig().reduce_bucket_size == REDUCE_BUCKET


def test_what_recomputation_starts_from_moves_to_the_host(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    kept = needs(rl, sizes, "trainer.recompute=full")
    moved = needs(rl, sizes, "trainer.recompute=full", "trainer.offload_activations=true")
    assert kept.activations - moved.activations == moved.host == 512 * 28 * 1024 * 2


def test_adapters_leave_little_to_learn(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    attention = needs(rl, sizes, "lora.rank=16", "lora.targets=[q_proj,nothing]")
    assert attention.gradients == 4 * 28 * 16 * (1024 + 2048)
    need = needs(rl, sizes, "zero=1", "lora.rank=16")
    attention_shapes = [(1024, 2048), (1024, 1024), (1024, 1024), (2048, 1024)]
    shapes = [*attention_shapes, (1024, 3072), (1024, 3072), (3072, 1024)]
    learned = 28 * 16 * sum(a + b for a, b in shapes)
    assert need.gradients == 4 * learned
    assert need.parameters == 2 * (sizes.parameters + learned)


def test_adapters_of_experts_are_each_experts(rl, tmp_path: Path) -> None:
    """128 experts of three projections; names of linear layers mean none of them."""
    sizes = sizes_of(QWEN3_30B_A3B, tmp_path)
    attention = 48 * 16 * sum(a + b for a, b in [(2048, 4096), (2048, 512), (2048, 512), (4096, 2048)])
    experts = 48 * 16 * 128 * 3 * (2048 + 768)
    assert sizes.adapters(16, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]) == attention
    need = needs(rl, sizes, "zero=1", "lora=r16")
    assert need.gradients == 4 * (attention + experts)
    assert need.parameters == 2 * (sizes.parameters + attention + experts)
    other = sizes_of({**QWEN3_30B_A3B, "model_type": "mixtral"}, tmp_path)
    assert other.adapters(16, ["q_proj", "experts"]) == 48 * 16 * (2048 + 4096)
    assert sizes_of(QWEN3_0_6B, tmp_path).adapters(16, ["experts"]) == 0


def test_kv_of_an_engine(rl, tmp_path: Path) -> None:
    sizes = sizes_of(QWEN3_0_6B, tmp_path)
    config = rl("inference.max_model_len=1000", "inference.max_slots=10")
    need = engine_need(config, sizes, False, None)
    assert need.kv == 10 * 1000 * 2 * 28 * 8 * 128 * 4
    assert need.parameters == 4 * sizes.parameters
    engine = SimpleNamespace(max_model_len=1000, tensor_parallel_size=2, gpu_memory_utilization=0.5)
    config = SimpleNamespace(inference=engine, trainer=config.trainer)
    need = engine_need(config, sizes, True, 80 * GB)
    assert need.parameters == sizes.parameters and need.device == 40 * GB


def report(rl, *words: str, gpus: list[str], gpu: float | None, host: float | None = 1e12) -> str:
    config = rl(*words)
    return memory_report(config, place("rl", config, Path("x"), gpus), gpu, host)


def test_verdicts_add_up_what_shares_a_device(rl) -> None:
    alone = report(rl, gpus=["0", "1"], gpu=80 * GB)
    assert "GPU 0 of node 0: " in alone and "GPU 1 of node 0: " in alone and alone.count("fits") == 2
    shared = report(rl, gpus=["0"], gpu=30e6)
    assert re.search(r"GPU 0 of node 0: 0\.0\d of 0\.03 GB, (tight|DOES NOT FIT)", shared)
    assert "DOES NOT FIT" in report(rl, gpus=["0"], gpu=1e6)
    assert "size that is not known here" in report(rl, gpus=["0"], gpu=None)


def test_on_cpus_everything_shares_the_host(rl) -> None:
    text = report(rl, gpus=[], gpu=None, host=32 * GB)
    assert re.search(r"host 0: 0\.0\d of 32\.00 GB, fits", text) and "GPU" not in text


def test_alike_processes_take_one_line(rl) -> None:
    text = report(rl, "cluster.train_ranks=4", gpus=["0", "1", "2", "3", "4"], gpu=80 * GB)
    assert "trainer/0 and 3 more" in text and "GPU 1 of node 0 and 3 like it" in text


def test_a_dry_run_asks_the_machine(rl, tmp_path: Path) -> None:
    text = placement_report(rl(), place("rl", rl(), Path("x"), []))
    assert text.endswith("dry run: nothing was started, nothing was written") and "--- memory" in text
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemTotal:    2000 kB\n")
    assert host_bytes(tmp_path / "meminfo", tmp_path / "none") == 2000 * 1024
    (tmp_path / "max").write_text("1000\n")
    assert host_bytes(tmp_path / "meminfo", tmp_path / "max") == 1000
    (tmp_path / "max").write_text("max\n")
    assert host_bytes(tmp_path / "meminfo", tmp_path / "max") == 2000 * 1024
    assert driver_bytes("libno-such-driver.so") is None
    assert "80.00 GB" in placement_report(rl("cluster.gpu_gb=80"), place("rl", rl(), Path("x"), ["0"]))
