"""Whole supervised runs in this process or as several, what they logged, and a float64 reference."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from prl.config import training
from prl.config.schema import SftConfig
from prl.config.sft import RowsDataConfig, SftDataConfig
from prl.run_dir import RunDir

REPO = Path(__file__).parents[2]
EXACT = ("loss/mean", "optim/lr", "optim/grad_norm", "progress/num_samples", "progress/num_tokens")
"""What must be equal to the bit after a resume."""


def sft_config(max_steps: int, data: SftDataConfig | None = None, **fields: Any) -> SftConfig:
    """Float32 on the bundled model, AdamW with a schedule that differs in every step."""
    moving = training.LinearConfig(warmup_steps=3, decay_steps=3)
    settings: dict[str, Any] = {
        "optim": training.AdamWConfig(lr=1e-3),
        "scheduler": moving if max_steps >= 6 else training.SchedulerConfig(),
        "model": training.ModelConfig(name="tiny"),
        "trainer": training.TrainerConfig(seq_len=64),
        **fields,
    }
    rows = RowsDataConfig(name="reverse_text", path="bundled:reverse_text", batch_size=4, workers=0)
    made = SftConfig(data=data or rows, tracking=None, inference=None, **settings)
    made.max_steps = max_steps
    return made


def logged(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metric_file("trainer").read_text().splitlines()]


def exact(rows: list[dict[str, Any]]) -> list[list[Any]]:
    return [[row["step"], *(row[name] for name in EXACT)] for row in rows if "loss/mean" in row]


def reference_nll(model_path: Path, documents: list[tuple[list[int], list[bool]]]) -> tuple[float, int]:
    """(sum, number) of the cross-entropy of learned tokens in float64, document by document, full logits."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float64, attn_implementation="eager")
    total, learned = 0.0, 0
    for token_ids, mask in documents:
        ids = torch.tensor([token_ids])
        with torch.no_grad():
            logprobs = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0], -1)
        for i, flag in enumerate(mask):
            if flag:
                total -= float(logprobs[i - 1, token_ids[i]])
                learned += 1
    return total, learned


def run_ranks(jobs: list[tuple[str, SftConfig, Path]], ranks: int, folder: Path) -> None:
    """Each (name, config, run directory) as a run, one after the other in the same `ranks` processes."""
    from prl.config.load import dump_resolved

    folder.mkdir(parents=True, exist_ok=True)
    for number, (_, made, run) in enumerate(jobs):
        made.cluster.train_ranks = ranks
        made.output_dir, made.run.name = str(run.parent), run.name
        (folder / f"{number}.yaml").write_text(dump_resolved("sft", made))
    (folder / "jobs.json").write_text(json.dumps([str(run) for _, _, run in jobs]))
    processes = []
    for rank in range(ranks):
        variables = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": str(rank),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(REPO), str(Path(__file__).parent)]),
        }
        command = [
            sys.executable,
            str(Path(__file__).with_name("sft_ranks.py")),
            str(folder),
            str(rank),
            str(ranks),
        ]
        processes.append(
            subprocess.Popen(
                command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    outputs = [process.communicate(timeout=900)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(outputs)
