"""What the trainer's tests share: a tiny model on disk, batches of every component, a float64 reference.

The reference is written without packing, chunks, ranks or DeepSpeed: one sequence at a time, full logits.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from prl.config import loss, training
from prl.config.schema import RlConfig
from prl.config.serving import ClusterConfig, SyncConfig, TrackingConfig
from prl.records import MicroBatch

VOCAB = 40
EPS = 0.3  # of ipo
IPO = loss.IpoConfig(eps=EPS)
REPO = Path(__file__).parents[2]


def make_model(directory: Path, *, tied: bool = True, seed: int = 0, **changes: Any) -> Path:
    """A two-layer Qwen3 with random float32 weights that are far from uniform."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **changes}))
    model.save_pretrained(directory)
    return directory


def make_moe(directory: Path, **changes: Any) -> Path:
    """A two-layer Qwen3-MoE of four experts, of which each token visits two."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
    }
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **changes})).save_pretrained(directory)
    return directory


def make_config(model: Path, optim: training.OptimConfig, **fields: Any) -> RlConfig:
    settings = {"zero": training.ZeroConfig(stage=0), "scheduler": training.SchedulerConfig(), **fields}
    settings.setdefault("trainer", training.TrainerConfig(lm_head_chunk=5, dtype="float32"))
    return RlConfig(
        algo=None,
        loss=IPO,
        optim=optim,
        inference=None,
        tracking=TrackingConfig(name="none"),
        model=training.ModelConfig(name="lab", path=str(model)),
        sync=SyncConfig(),
        cluster=ClusterConfig(),
        **settings,
    )


def make_sequence(generator: torch.Generator, kind: str, env: str = "lab") -> MicroBatch:
    """One sequence as a row of its own. `kind`: rl, weighted, ce, ref_kl or none (no member of anything)."""
    n = int(torch.randint(4, 13, (1,), generator=generator))
    prompt = int(torch.randint(1, 4, (1,), generator=generator))
    mask = [i >= prompt and kind != "none" for i in range(n)]
    temperature = [0.7, 1.0, 1.3][int(torch.randint(0, 3, (1,), generator=generator))]

    def noise() -> list[float]:
        return torch.randn(n, generator=generator).tolist()

    row = MicroBatch(
        input_ids=torch.randint(0, VOCAB, (n,), generator=generator).tolist(),
        position_ids=list(range(n)),
        loss_mask=mask,
        advantages=noise(),
        inference_logprobs=[-2.0 + 0.5 * x for x in noise()],
        temperatures=[temperature] * n,
        sequence_lengths=[n],
        envs=[env],
        trace_ids=[f"{kind}-{n}"],
    )
    marked = [float(m) for m in mask]
    if kind == "weighted":
        row.rl_weights = [m * (0.5 if i % 2 else 0.0) for i, m in enumerate(marked)]
    if kind in ("ce", "ref_kl"):
        row.rl_weights = [0.0] * n
        setattr(row, f"{kind}_weights", [0.8 * m for m in marked])
    if kind == "ref_kl":
        row.ref_logprobs = [-2.5 + 0.3 * x for x in noise()]
    return row


def pack(sequences: list[MicroBatch]) -> MicroBatch:
    """One row out of several; absent streams take their meaning (rl 1, the others 0)."""
    fill = {"ref_logprobs": 0.0, "rl_weights": 1.0, "ce_weights": 0.0, "ref_kl_weights": 0.0}
    row = asdict(sequences[0])
    for name, value in fill.items():
        present = any(getattr(s, name) is not None for s in sequences)
        row[name] = [] if present else None
        for s in sequences if present else []:
            row[name] += getattr(s, name) or [value] * len(s)
    for name in row:
        if name not in fill:
            row[name] = [x for s in sequences for x in getattr(s, name)]
    return MicroBatch(**row)


def make_sequences(seed: int, kinds: list[str]) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(seed)
    return [make_sequence(generator, kind, env=f"env{i % 2}") for i, kind in enumerate(kinds)]


def sequence_logprobs(model: torch.nn.Module, row: MicroBatch) -> torch.Tensor:
    """[n] logprob of each token of a lone sequence; entry 0 is 0."""
    ids = torch.tensor([row.input_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
    scaled = logits / torch.tensor(row.temperatures[1:], dtype=logits.dtype)[:, None]
    picked = F.log_softmax(scaled, -1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([picked.new_zeros(1), picked])


def reference_sums(model: torch.nn.Module, row: MicroBatch) -> tuple[dict, dict]:
    """(loss sum, denominator) of each component of a lone sequence, under ipo."""
    lp = sequence_logprobs(model, row)
    sums: dict[str, Any] = {"rl": 0.0, "ce": 0.0, "ref_kl": 0.0}
    counts = {"rl": 0.0, "ce": 0.0, "ref_kl": 0.0}
    for i, token in enumerate(row.loss_mask):
        w_rl = 1.0 if row.rl_weights is None else row.rl_weights[i]
        w_ce = 0.0 if row.ce_weights is None else row.ce_weights[i]
        w_kl = 0.0 if row.ref_kl_weights is None else row.ref_kl_weights[i]
        ratio = torch.exp(lp[i] - row.inference_logprobs[i])
        keep = abs(math.exp(lp[i].item()) - math.exp(row.inference_logprobs[i])) <= EPS
        if token and w_rl:
            sums["rl"] = sums["rl"] - keep * w_rl * row.advantages[i] * ratio
            counts["rl"] += w_rl
        if w_ce:
            sums["ce"] = sums["ce"] - w_ce * lp[i]
            counts["ce"] += 1
        if w_kl:
            credit = row.ref_logprobs[i] - lp[i].item()
            sums["ref_kl"] = sums["ref_kl"] - keep * w_kl * credit * ratio
            counts["ref_kl"] += 1
    return sums, counts


def reference_loss(model: torch.nn.Module, sequences: list[MicroBatch]) -> torch.Tensor:
    parts = [reference_sums(model, s) for s in sequences]
    total: Any = 0.0
    for name in ("rl", "ce", "ref_kl"):
        count = sum(c[name] for _, c in parts)
        if count:
            total = total + sum(s[name] for s, _ in parts) / count
    return total


def load_reference(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    model.config._experts_implementation = "eager"  # the grouped kernel knows no float64
    return model.train()


def reference_run(
    directory: Path,
    steps: list[list[MicroBatch]],
    make_optimizer: Any,
    max_norm: float | None,
    factor: Any = lambda step: 1.0,
) -> dict[str, Any]:
    """Losses, pre-clip norms and final weights of a plain float64 loop over lone sequences."""
    model = load_reference(directory)
    losses, norms = reference_steps(model, steps, make_optimizer(model), max_norm, factor)
    return {"losses": losses, "norms": norms, "weights": dict(model.named_parameters())}


def run_of_ranks(directory: Path, case: str) -> dict[str, Any]:
    """What the ranks of `zero_worker.py` left of a case, in the form of `reference_run`."""
    metrics = json.loads((directory / f"{case}.json").read_text())
    return {
        "losses": [m["loss/mean"] for m in metrics],
        "norms": [m["optim/grad_norm"] for m in metrics],
        "weights": load_file(directory / f"{case}.safetensors"),
    }


def assert_equal(
    mine: dict[str, Any],
    reference: dict[str, Any],
    *,
    loss_error: float = 1e-6,
    norm_error: float = 1e-5,
    weight_error: float = 1e-5,
) -> None:
    """Losses and weights to an absolute error, norms to a relative one."""
    assert mine["losses"] == pytest.approx(reference["losses"], abs=loss_error)
    assert mine["norms"] == pytest.approx(reference["norms"], rel=norm_error)
    assert mine["weights"].keys() == reference["weights"].keys()
    for name, weight in reference["weights"].items():
        assert (mine["weights"][name] - weight).abs().max() < weight_error, name


def reference_steps(
    model: torch.nn.Module,
    steps: list[list[MicroBatch]],
    optimizer: Any,
    max_norm: float | None = 1.0,
    factor: Any = lambda step: 1.0,
) -> tuple[list[float], list[float]]:
    """(losses, pre-clip norms) of the plain loop, which trains what `optimizer` holds."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    losses, norms = [], []
    for step, sequences in enumerate(steps, 1):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor(step)
        optimizer.zero_grad()
        value = reference_loss(model, sequences)
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm or float("inf"))))
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, norms


def without_a_compiler(backend: Any = "aot_eager") -> dict[str, Any]:
    """What to put into `prl.trainer.model` so that `trainer.compile` works everywhere.

    Layers are traced and taken apart into forward and backward as ever; torch's own kernels run them.
    """
    from prl.trainer.lm_head import EAGER
    from prl.trainer.recompute import prepare_layers

    return {
        "prepare_layers": partial(prepare_layers, backend=backend),
        "compiled_kernels": lambda: EAGER,
        "check_compiler": lambda _: None,
    }


def spawn(
    tmp_path: Path, script: str, world: int, job: dict[str, Any], environment: dict[str, str] | None = None
) -> None:
    """Run `script` (a file beside this one) as `world` processes told who they are by variables only."""
    (tmp_path / "job.json").write_text(json.dumps({**job, "out": str(tmp_path)}))
    processes = []
    for rank in range(world):
        variables = {
            **os.environ,
            **(environment or {}),
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPO), str(Path(__file__).parent)]),
        }
        command = [sys.executable, str(Path(__file__).with_name(script)), str(tmp_path / "job.json")]
        processes.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    try:
        outputs = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [0] * world, "\n".join(outputs)
