"""Speed, progress, perplexity, rows whose loss is not finite, the dataset of the tracker, the benchmark."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sft_lab import sft_config

from prl.checkpoint.retention import disk
from prl.config.compose import compose_job
from prl.config.sft import RowsDataConfig
from prl.loss.components import NonFiniteLoss
from prl.sft.documents import Document
from prl.sft.feed import count
from prl.sft.main import NO_POLICY_TOKENS
from prl.sft.metrics import WINDOW, Speed, progress, true_lengths
from prl.sft.packing import as_micro_batch
from prl.sft.validation import perplexity
from prl.tracking.board import Board
from prl.tracking.mlflow_inputs import contexts, digest_of, source_type
from prl.tracking.progress import clock, outlook, seconds_left
from prl.tracking.reader import Record
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import train_step


def row(*sizes: int) -> Any:
    documents = [
        Document(i, "p", f"row:{i}", [(7 * i + j) % 264 for j in range(size)], [j > 0 for j in range(size)])
        for i, size in enumerate(sizes)
    ]
    return as_micro_batch(documents, "lab", 32)


@pytest.fixture
def engine(world: World) -> Any:
    made = TrainEngine(sft_config(1), world, None)
    yield made
    made.close()


def test_speed_counts_true_tokens_over_a_window(engine: TrainEngine) -> None:
    speed = Speed(engine)
    assert true_lengths(row(5, 9)) == [5, 9]
    for _ in range(WINDOW):
        told = speed.step([row(5, 9)], 100.0)
    assert told["perf/throughput"] == pytest.approx(0.14) and "perf/mfu" not in told
    for _ in range(WINDOW):
        told = speed.step([row(5, 9), row(6)], 2.0)
    assert told["perf/throughput"] == told["perf/throughput_per_gpu"] == pytest.approx(10.0)
    speed._peak = 1e9
    documents = [5, 9, 6]
    flops = 3 * sum(speed._cost.alpha * n + speed._cost.beta * n * n for n in documents)
    assert speed.step([row(5, 9), row(6)], 2.0)["perf/mfu"] == pytest.approx(100 * flops / 2 / 1e9)


def test_progress_counts_epochs_parts_and_what_was_left_out(world: World) -> None:
    counters: Counter[str] = Counter(skipped=2)
    for part, size in (("a", 4), ("a", 4), ("b", 12)):
        count(counters, Document(0, part, "x", list(range(size)), [i > 1 for i in range(size)], part == "b"))
    documents = SimpleNamespace(size=10, parts=["a", "b"])
    told = progress(SimpleNamespace(counters=counters, reader=SimpleNamespace(documents=documents)), world)
    assert told == {
        "progress/num_samples": 3,
        "progress/num_tokens": 20,
        "progress/num_learned_tokens": 14,
        "progress/num_skipped": 2,
        "progress/num_truncated": 1,
        "progress/epoch": 0.5,
        "progress/a/ratio_samples": pytest.approx(2 / 3),
        "progress/a/ratio_tokens": pytest.approx(0.4),
        "progress/b/ratio_samples": pytest.approx(1 / 3),
        "progress/b/ratio_tokens": pytest.approx(0.6),
    }


def test_perplexity_has_an_end() -> None:
    assert perplexity(1.5) == pytest.approx(math.exp(1.5)) and perplexity(900.0) == math.exp(20)


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    told = disk(tmp_path / "a" / "b")
    assert told["system/ckpt_disk_total_gib"] > told["system/ckpt_disk_free_gib"] > 0
    assert told["system/ckpt_disk_free_ratio"] == pytest.approx(
        told["system/ckpt_disk_free_gib"] / told["system/ckpt_disk_total_gib"], rel=0.01
    )


def test_a_row_whose_loss_is_not_finite_is_left_out_and_counted(engine: TrainEngine) -> None:
    """Only the row that holds a NaN is lost, and nothing of it reaches the weights."""
    plain = train_step(engine, [row(9)], NO_POLICY_TOKENS, 1, skip_non_finite=True)
    assert plain["loss/nan_count"] == 0
    original = engine.deepspeed.module.forward

    def forward(input_ids: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropy = original(input_ids, *rest)
        return (logprobs * math.nan if 263 in input_ids else logprobs), entropy

    engine.deepspeed.module.forward = forward
    bad = as_micro_batch([Document(0, "p", "bad", [1, 263, 5], [False, True, True])], "lab")
    with pytest.raises(NonFiniteLoss, match="'bad'"):
        train_step(engine, [bad], NO_POLICY_TOKENS, 2)
    told = train_step(engine, [row(9), bad], NO_POLICY_TOKENS, 2, skip_non_finite=True)
    assert told["loss/nan_count"] == 1
    assert math.isfinite(told["loss/mean"]) and math.isfinite(told["optim/grad_norm"])
    assert told["nll/mean"] > 0 and all(torch.isfinite(t).all() for _, t in engine.full_tensors())


def test_the_tracker_gets_the_data_with_a_digest_of_its_contents(tmp_path: Path) -> None:
    config = compose_job("sft", ["data@val.data=reverse_text", "val.data.splits=[test]"])
    assert [(context, data.name) for context, data in contexts(config)] == [
        ("training", "reverse_text"),
        ("validation", "reverse_text"),
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n')
    data = RowsDataConfig(path=str(file))
    before = digest_of(data)
    assert before == digest_of(data) and len(before) == 16 and source_type(data) == "local"
    file.write_text('{"prompt": "a", "completion": "c"}\n')
    assert digest_of(data) != before
    assert source_type(RowsDataConfig(path="owner/name")) == "hf"
    assert source_type(compose_job("sft", ["data=fake"]).data) == "generated"


def test_what_is_left_of_a_run() -> None:
    board = Board(10)
    assert outlook(board) == "" and seconds_left(board) is None
    values = {"optim/lr": 1.0, "time/step": 12.0, "perf/throughput": 8371.2}
    board.update([Record("trainer", step, 0.0, values) for step in (1, 2, 3)])
    assert seconds_left(board) == 84.0 and outlook(board) == ", 1:24 left at 8,371 tokens/s"
    board.max_steps = None
    assert outlook(board) == ""
    assert [clock(s) for s in (7, 754, 3723)] == ["0:07", "12:34", "1:02:03"]


def test_bench_measures_whole_steps(tmp_path: Path, capsys: pytest.CaptureFixture, world: World) -> None:
    from prl.bench.sft import main

    out = tmp_path / "bench.json"
    words = [
        "data=reverse_text",
        "seq_len=64",
        "rows=2",
        "steps=1",
        "data.packing=cat,fit",
        "--json",
        str(out),
    ]
    assert main(words) == 0
    results = json.loads(out.read_text())
    assert [r["overrides"] for r in results] == [{"data.packing": "cat"}, {"data.packing": "fit"}]
    assert all(r["tok_s"] > 0 and r["peak_gib"] > 0 and 0 < r["filled"] <= 100 for r in results)
    assert "tok/s" in capsys.readouterr().out
    assert main(["steps=none"]) == 2 and main(["cluster.train_ranks=2"]) == 2
    assert "one rank only" in capsys.readouterr().err
    assert main(["--help"]) == 0 and "prl bench sft" in capsys.readouterr().out
