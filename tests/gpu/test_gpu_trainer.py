"""The trainer on a GPU: what only a GPU can show. Skipped without one; two ranks need two.

python -m pytest -m gpu tests/gpu/test_gpu_trainer.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU: torch.cuda.is_available() is false", allow_module_level=True)

from gpu_lab import (
    IPO,
    SMOOTH,
    VOCAB,
    apart,
    load_reference,
    make_config,
    make_model,
    masters,
    reference_logprobs,
    rows_of,
    run,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from prl.bench.bare_engine import BareEngine
from prl.bench.fake_rows import fake_row
from prl.bench.trainer import device_name
from prl.config import training
from prl.loss.batch import from_micro_batch, row_inputs
from prl.loss.components import NonFiniteLoss
from prl.trainer import distributed
from prl.trainer import engine as engine_module
from prl.trainer.attention import kernel_choice, packed_attention
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.flops import peak_flops
from prl.trainer.model import load_policy
from prl.trainer.step import train_step

pytestmark = pytest.mark.gpu

NOISE = 0.02
"""Share of the movement of the weights that bfloat16 kernels in another order may differ by."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    joined = distributed.join(0, 1, tmp_path_factory.mktemp("group") / "store", timeout=120)
    distributed.import_deepspeed()
    yield joined
    distributed.leave(joined)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "qwen3")


def trained(config: Any, world: World) -> tuple[list[dict[str, float]], torch.Tensor, torch.Tensor]:
    """(metrics of three steps, masters before, masters after)."""
    engine = TrainEngine(config, world, None)
    start = masters(engine)
    metrics = run(engine)
    end = masters(engine)
    engine.close()
    return metrics, start, end


def same_metrics(found: list[dict[str, float]], expected: list[dict[str, float]], rel: float = 1e-2) -> None:
    """The loss is a mean of advantages of both signs: near 0, of terms near 1."""
    for key, absolute in (("loss/mean", rel), ("optim/grad_norm", 0.0), ("entropy/all/mean", 0.0)):
        assert [m[key] for m in found] == pytest.approx([m[key] for m in expected], rel=rel, abs=absolute), (
            key
        )


def test_names_and_peaks_of_the_device(world: World) -> None:
    assert world.device.type == "cuda" and device_name(world.device) != "CPU"
    if "H200" in device_name(world.device) or "H100" in device_name(world.device):
        assert peak_flops(world.device) == 989e12


@pytest.mark.parametrize("max_norm", [None, 0.05])
def test_the_spared_bf16_step_is_deepspeeds_own(
    max_norm: float | None, world: World, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    optim = training.AdamWConfig(**{**vars(SMOOTH), "max_norm": max_norm})
    config = make_config(model_dir, optim=optim)
    metrics, start, end = trained(config, world)
    monkeypatch.setattr(engine_module, "spare_the_bf16_step", lambda *_: None)
    plain, _, expected = trained(config, world)
    same_metrics(metrics, plain)
    assert apart(end, expected, start) < NOISE
    assert all(m["optim/grad_norm"] > 1.0 for m in plain), "the limit bites"


def test_deepspeed_does_the_step_of_the_bare_engine(world: World, model_dir: Path) -> None:
    config = make_config(model_dir)
    metrics, start, end = trained(config, world)
    bare = BareEngine(config, world)
    expected_metrics = run(bare)
    expected = torch.cat([master.detach().flatten() for _, master in bare._pairs])
    bare.close()
    same_metrics(metrics, expected_metrics)
    assert apart(end, expected, start) < NOISE


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stages_agree_on_one_gpu(stage: int, dtype: str, world: World, model_dir: Path) -> None:
    expected, *_ = trained(make_config(model_dir, dtype=dtype, zero={"stage": 1}), world)
    found, start, end = trained(make_config(model_dir, dtype=dtype, zero={"stage": stage}), world)
    same_metrics(found, expected)
    assert not torch.equal(start, end)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_bad_logprob_stops_the_step_before_weights_change(
    stage: int, value: float, world: World, model_dir: Path
) -> None:
    """In the second row, at an unmasked token in the middle of its second document."""
    engine = TrainEngine(make_config(model_dir, zero={"stage": stage}), world, None)
    before, rows = masters(engine), rows_of(1)
    original, calls = engine.deepspeed.module.forward, []

    def forward(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = original(*inputs)
        calls.append(len(inputs[0]))
        if len(calls) == 2:
            bad = torch.zeros_like(logprobs)
            bad[100] = value
            logprobs = logprobs + bad
        return logprobs, entropy

    engine.deepspeed.module.forward = forward
    with pytest.raises(NonFiniteLoss, match=r"bench-1', token 20 of its sample"):
        train_step(engine, rows, IPO, 1)
    assert torch.equal(masters(engine), before)
    engine.close()


def test_rows_arrive_whole_while_the_gpu_is_busy(world: World) -> None:
    """Pinned host memory must live until its copy is done, however far the host is ahead."""
    busy = torch.randn(6000, 6000, device=world.device)
    rows = [fake_row(4096, 3, VOCAB, seed=seed) for seed in range(20)]
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    moved = []
    for row in rows:
        inputs = row_inputs(row, world.device)
        moved.append(from_micro_batch(row, world.device, inputs))
    for row, found in zip(rows, moved, strict=True):
        assert found.input_ids.tolist() == row.input_ids
        assert found.position_ids.tolist() == row.position_ids
        assert found.loss_mask.tolist() == row.loss_mask
        assert torch.equal(found.advantages.cpu(), torch.tensor(row.advantages))
        assert torch.equal(found.inference_logprobs.cpu(), torch.tensor(row.inference_logprobs))
        assert found.members["rl"].tolist() == [i for i, inside in enumerate(row.loss_mask) if inside]


def forward(policy: torch.nn.Module, row: Any, device: torch.device) -> torch.Tensor:
    ids, positions = (torch.tensor(x, device=device) for x in (row.input_ids, row.position_ids))
    temperatures = torch.tensor(row.temperatures, device=device)
    return policy(ids, positions, temperatures, tuple(row.sequence_lengths))[0]


@pytest.mark.parametrize(
    ("attn", "documents"), [("auto", 1), ("auto", 4), ("flash", 4), ("flash", 12), ("sdpa", 4), ("flex", 4)]
)
def test_packed_equals_separate_forward_and_gradient(
    attn: str, documents: int, world: World, model_dir: Path
) -> None:
    """Against float64 and lone sequences; twelve documents go through the variable-length kernel."""
    device, row = world.device, fake_row(300, documents, VOCAB, seed=3)
    settings = training.TrainerConfig(attn=attn, dtype="bfloat16", lm_head_chunk=128)
    policy = load_policy(training.ModelConfig(name="lab", path=str(model_dir)), settings, device, 0).to(
        device
    )
    inner = torch.tensor(row.position_ids, device=device) > 0
    slope = torch.linspace(-1, 1, len(row), device=device) * inner
    with kernel_choice(device)():
        logprobs = forward(policy, row, device)
        (logprobs * slope).sum().backward()
    reference = load_reference(model_dir, device)
    expected = reference_logprobs(reference, row, device)
    (expected * slope).sum().backward()
    assert (logprobs - expected)[inner].abs().max() < 0.1
    found = torch.cat([p.grad.flatten().double() for p in policy.parameters()])
    wanted = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


@pytest.mark.parametrize(("attn", "documents"), [("flash", 4), ("flash", 12), ("sdpa", 4), ("flex", 4)])
def test_neighbours_cannot_be_seen(attn: str, documents: int, world: World, model_dir: Path) -> None:
    """Other tokens in the first document change nothing in the others, to the last bit."""
    device, row = world.device, fake_row(300, documents, VOCAB, seed=3)
    changed, first = fake_row(300, documents, VOCAB, seed=3), row.sequence_lengths[0]
    changed.input_ids[:first] = [(token + 1) % VOCAB for token in changed.input_ids[:first]]
    settings = training.TrainerConfig(attn=attn, dtype="bfloat16")
    policy = load_policy(training.ModelConfig(name="lab", path=str(model_dir)), settings, device, 0).to(
        device
    )
    with torch.no_grad(), kernel_choice(device)():
        before, after = (forward(policy, r, device) for r in (row, changed))
    assert not torch.equal(before[1:first], after[1:first])
    assert torch.equal(before[first + 1 :], after[first + 1 :])


@pytest.mark.parametrize("backend", [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, None])
@pytest.mark.parametrize("lengths", [(512,), (100, 300, 112), (1, 30, *[60] * 8, 1)])
def test_every_kernel_of_the_packed_attention(
    backend: SDPBackend | None, lengths: tuple[int, ...], world: World
) -> None:
    """Forced, so that none of them is replaced by another unseen; None is the order of the trainer."""
    generator = torch.Generator(world.device).manual_seed(1)

    def draw(heads: int) -> torch.Tensor:
        values = torch.randn(1, heads, sum(lengths), 128, device=world.device, generator=generator)
        return values.bfloat16().requires_grad_()

    if backend is SDPBackend.CUDNN_ATTENTION and 1 in lengths:
        pytest.skip("cuDNN takes no sequence of one token; the trainer's order falls back for it")
    query, key, value = draw(8), draw(2), draw(2)
    choice = sdpa_kernel([backend]) if backend else kernel_choice(world.device)()
    slope = torch.randn(1, sum(lengths), 8, 128, device=world.device, generator=generator)
    with choice:
        found, _ = packed_attention(None, query, key, value, None, sequence_lengths=lengths)
        (found.float() * slope).sum().backward()
    exact = [x.detach().double().requires_grad_() for x in (query, key, value)]
    expected = one_by_one(*exact, lengths)
    (expected * slope).sum().backward()
    assert (found - expected).abs().max() < 0.03
    for mine, other in zip((query, key, value), exact, strict=True):
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.02


def test_heads_that_the_variable_length_kernel_does_not_take_go_one_by_one(world: World) -> None:
    lengths = (5,) * 12
    query, key, value = (torch.randn(1, 2, 60, 20, device=world.device).bfloat16() for _ in range(3))
    with kernel_choice(world.device)():
        found, _ = packed_attention(None, query, key, value, None, sequence_lengths=lengths)
    expected = one_by_one(query.double(), key.double(), value.double(), lengths)
    assert (found - expected).abs().max() < 0.03


def one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: tuple[int, ...]
) -> torch.Tensor:
    """softmax(q k / sqrt(d)) v of each sequence, from the definition; [1, n, heads, d]."""
    groups, parts = query.shape[1] // key.shape[1], []
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    for q, k, v in zip(*(x.split(list(lengths), 2) for x in (query, key, value)), strict=True):
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        parts.append(scores.masked_fill(later, -math.inf).softmax(-1) @ v)
    return torch.cat(parts, 2).transpose(1, 2)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_compiled_step_is_the_eager_step(recompute: str, world: World, model_dir: Path) -> None:
    torch._dynamo.reset()
    eager, start, expected = trained(make_config(model_dir, recompute=recompute), world)
    compiled, _, end = trained(make_config(model_dir, recompute=recompute, compile=True), world)
    same_metrics(compiled, eager, rel=2e-2)
    assert apart(end, expected, start) < 0.05  # fused kernels round in other places


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("stage", [1, 3])
def test_activations_come_back_from_host_memory(
    stage: int, recompute: str, world: World, model_dir: Path
) -> None:
    plain, start, expected = trained(make_config(model_dir, zero={"stage": stage}), world)
    config = make_config(model_dir, zero={"stage": stage}, recompute=recompute, offload_activations=True)
    found, _, end = trained(config, world)
    same_metrics(found, plain)
    assert apart(end, expected, start) < NOISE


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 1, "offload_optimizer": True},
        {"stage": 2, "offload_optimizer": True},
        {"stage": 3, "offload_optimizer": True, "offload_parameters": True},
    ],
)
def test_optimizer_and_parameters_in_host_memory(zero: dict[str, Any], world: World, model_dir: Path) -> None:
    plain, start, expected = trained(make_config(model_dir, zero={"stage": zero["stage"]}), world)
    found, _, end = trained(make_config(model_dir, zero=zero), world)
    same_metrics(found, plain)
    assert apart(end.to(world.device), expected, start) < NOISE


def test_memory_is_given_back(world: World, model_dir: Path) -> None:
    """An engine that was closed leaves nothing on the device for the next one."""
    left = []
    for _ in range(3):
        trained(make_config(model_dir), world)
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated(world.device))
    assert left[2] <= left[1] + (1 << 20)
