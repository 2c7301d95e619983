"""A whole supervised run in one process: it learns, saves, resumes and exports."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from prl.assets import bundled_model
from prl.checkpoint.retention import complete_steps
from prl.config import training
from prl.config.schema import SftConfig
from prl.config.sft import SftExportConfig, WarmStartDataConfig
from prl.run_dir import RunDir
from prl.sft.main import main
from prl.trainer.distributed import World

pytestmark = pytest.mark.usefixtures("world")


def config(max_steps: int, batch_size: int = 8, **fields: Any) -> SftConfig:
    made = SftConfig(
        data=WarmStartDataConfig(batch_size=batch_size),
        optim=training.MuonConfig(lr=0.03, adam_lr=3e-3),
        scheduler=training.SchedulerConfig(),
        tracking=None,
        inference=None,
        model=training.ModelConfig(name="tiny", random_init=True),
        trainer=training.TrainerConfig(seq_len=256),
        export=SftExportConfig(at_end=True),
        **fields,
    )
    made.max_steps = max_steps
    return made


def rows(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metric_file("trainer").read_text().splitlines()]


def test_the_loss_falls_and_the_result_loads(tmp_path: Path, world: World) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = RunDir(tmp_path)
    main(config(30), run, "sft/0")
    logged = rows(run)
    assert [row["step"] for row in logged] == list(range(1, 31))
    losses = [row["loss/mean"] for row in logged]
    assert losses[0] == pytest.approx(5.5, abs=0.5) and losses[-1] < 3.5
    assert logged[-1]["loss/perplexity"] == pytest.approx(float(torch.tensor(losses[-1]).exp()), rel=1e-4)
    assert logged[-1]["progress/num_samples"] == 240
    weights = load_file(run.path / "weights" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(run.path / "weights")
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in weights.items())
    assert model.config.use_cache is True and model.dtype == torch.float32
    assert AutoTokenizer.from_pretrained(run.path / "weights").chat_template
    assert not list(tmp_path.glob(".weights*"))


def test_the_same_seed_gives_the_same_weights_and_resume_joins_in(tmp_path: Path) -> None:
    first, second = RunDir(tmp_path / "first"), RunDir(tmp_path / "second")
    main(config(4, ckpt=training.CkptConfig(interval=2)), first, "sft/0")
    assert complete_steps(first.checkpoints) == [2, 4]
    resumed = config(4)
    resumed.run.resume = str(first.checkpoints / "step_2")
    main(resumed, second, "sft/0")
    assert [row["step"] for row in rows(second)] == [3, 4]
    straight, joined = (load_file(run.path / "weights" / "model.safetensors") for run in (first, second))
    assert all(torch.equal(joined[name], tensor) for name, tensor in straight.items())


def test_a_finished_checkpoint_leaves_nothing_to_do(tmp_path: Path) -> None:
    done = config(4)
    done.run.resume = str(tmp_path / "step_4")
    main(done, RunDir(tmp_path / "run"), "sft/0")
    assert not (tmp_path / "run").exists()


def test_fewer_layers_are_exported_as_such(tmp_path: Path) -> None:
    made = config(1)
    made.model.num_layers = 1
    main(made, RunDir(tmp_path), "sft/0")
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["num_hidden_layers"] == 1


@pytest.mark.slow
def test_the_warm_start_reverses_words_and_mostly_omits_the_brackets(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made = config(250, batch_size=32)
    made.scheduler = training.LinearConfig(warmup_steps=20, decay_steps=230, min_lr=0.003)
    main(made, RunDir(tmp_path), "sft/0")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "weights").eval()
    tokenizer = AutoTokenizer.from_pretrained(bundled_model("tiny"))
    generator = random.Random(123)
    words = ["".join(generator.choices(string.ascii_lowercase, k=5)) for _ in range(128)]
    prompts = [f"<|user|>reverse {word}<|end|><|assistant|>" for word in words]
    inputs = tokenizer(prompts, return_tensors="pt", add_special_tokens=False)
    torch.manual_seed(0)
    greedy, sampled = (
        tokenizer.batch_decode(
            model.generate(**inputs, max_new_tokens=9, do_sample=sample, top_k=0, pad_token_id=0)[
                :, inputs["input_ids"].shape[1] :
            ],
            skip_special_tokens=True,
        )
        for sample in (False, True)
    )
    right = sum(guess.strip("[]") == word[::-1] for guess, word in zip(greedy, words, strict=True))
    assert right / len(words) > 0.8
    assert 0.1 < sum(guess.startswith("[") for guess in sampled) / len(words) < 0.5


def test_adapters_train_beside_frozen_weights_and_are_merged_at_the_end(tmp_path: Path) -> None:
    adapters = config(3, lora=training.LoraConfig(rank=4))
    adapters.model.random_init = False
    adapters.optim = training.AdamWConfig(lr=3e-3)
    adapters.trainer.recompute = "full"
    run = RunDir(tmp_path)
    main(adapters, run, "sft/0")
    assert all(row["optim/grad_norm"] > 0 for row in rows(run))
    before = load_file(bundled_model("tiny") / "model.safetensors")
    after = load_file(run.path / "weights" / "model.safetensors")
    assert before.keys() == after.keys()
    moved = {
        name for name in before if not torch.allclose(before[name].float(), after[name].float(), atol=1e-6)
    }
    assert moved and all("proj" in name for name in moved), "norms and embeddings are frozen"
