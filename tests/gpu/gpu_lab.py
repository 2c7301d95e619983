"""What the trainer's GPU tests share: a small Qwen3 that every attention kernel takes, rows, a float64 loop.

Nothing here says "cuda": the device is that of the process group, so the arithmetic can be tried on CPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.bench.fake_rows import fake_row
from prl.config import loss, training
from prl.config.schema import RlConfig
from prl.config.serving import ClusterConfig, SyncConfig, TrackingConfig
from prl.records import MicroBatch
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step

VOCAB = 512
IPO = loss.IpoConfig(eps=1.0)  # no token is dropped, so no threshold can be crossed by rounding
REPO = Path(__file__).parents[2]
SMOOTH = training.AdamWConfig(lr=1e-2, betas=[0.9, 0.95], eps=1e-2, weight_decay=0.0)
"""With an `eps` above the gradients an update is proportional to them: no sign of a tiny one decides."""


def make_model(directory: Path) -> Path:
    """Two layers, heads of 64, two query heads a key head; float32 files that bfloat16 holds exactly."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
    more = {"vocab_size": VOCAB, "initializer_range": 0.05, "tie_word_embeddings": True}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, **more))
    model.bfloat16().float().save_pretrained(directory)
    return directory


def make_config(
    model: Path, *, optim: training.OptimConfig = SMOOTH, zero: dict[str, Any] | None = None, **trainer: Any
) -> RlConfig:
    settings = {"lm_head_chunk": 100, "dtype": "bfloat16"} | trainer
    stage = {"stage": 1, "param_persistence_threshold": 0} | (zero or {})
    return RlConfig(
        algo=None,
        loss=IPO,
        optim=optim,
        inference=None,
        tracking=TrackingConfig(name="none"),
        model=training.ModelConfig(name="lab", path=str(model)),
        sync=SyncConfig(),
        cluster=ClusterConfig(),
        zero=training.ZeroConfig(**stage),
        scheduler=training.SchedulerConfig(),
        trainer=training.TrainerConfig(**settings),
    )


def rows_of(step: int, documents: Sequence[int] = (1, 3)) -> list[MicroBatch]:
    """One row of 240 tokens for each number of documents."""
    return [fake_row(240, docs, VOCAB, seed=100 * step + i) for i, docs in enumerate(documents)]


def run(engine: Any, steps: int = 3, documents: Sequence[int] = (1, 3)) -> list[dict[str, float]]:
    return [train_step(engine, rows_of(step, documents), IPO, step) for step in range(1, steps + 1)]


def masters(engine: TrainEngine) -> Tensor:
    """This rank's float32 weights as one vector, without the padding at its end."""
    from prl.checkpoint.zero import partitions

    runs = [held.of(part.flat).run for part in partitions(engine.deepspeed) for held in part.runs]
    return torch.cat([part.clone() for part in runs])


def apart(found: Tensor, expected: Tensor, start: Tensor) -> float:
    """|found - expected| as a share of how far `expected` went from `start` (2-norms)."""
    moved = (expected.double() - start.double()).norm()
    assert moved > 0
    return float((found.double() - expected.double()).norm() / moved)


def load_reference(directory: Path, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    return model.to(device).train()


def reference_logprobs(model: torch.nn.Module, row: MicroBatch, device: torch.device) -> Tensor:
    """[n] logprob of each token of a packed row, its sequences one by one; 0 where none comes before."""
    found, start = [], 0
    for size in row.sequence_lengths:
        ids = torch.tensor(row.input_ids[start : start + size], device=device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        picked = F.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        found += [picked.new_zeros(1), picked]
        start += size
    return torch.cat(found)


def spawn(directory: Path, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Run `gpu_rank.py` as `world` processes told who they are by variables; what rank 0 found."""
    directory.mkdir(parents=True)
    (directory / "job.json").write_text(json.dumps({**job, "out": str(directory)}))
    command = [sys.executable, str(Path(__file__).with_name("gpu_rank.py")), str(directory / "job.json")]
    paths = os.pathsep.join([str(REPO), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    common = {**os.environ, "WORLD_SIZE": str(world), "PYTHONPATH": paths}
    processes = []
    for rank in range(world):
        variables = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with (directory / f"rank_{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT))
    try:
        codes = [process.wait(600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    logs = "\n".join((directory / f"rank_{rank}.log").read_text() for rank in range(world))
    assert codes == [0] * world, logs
    return json.loads((directory / "found.json").read_text())
