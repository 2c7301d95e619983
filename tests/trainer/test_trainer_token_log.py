from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from prl.loss.batch import from_micro_batch
from prl.records import MicroBatch
from prl.run_dir import RunDir
from prl.trainer.token_log import TokenLog, open_token_log


def row(*sequences: tuple[str, list[bool]]) -> MicroBatch:
    """A packed row of sequences, each (trace id, which tokens were sampled); an empty id is padding."""
    masks = [flag for _, mask in sequences for flag in mask]
    return MicroBatch(
        input_ids=list(range(len(masks))),
        position_ids=[position for _, mask in sequences for position in range(len(mask))],
        loss_mask=masks,
        advantages=[1.0 if flag else 0.0 for flag in masks],
        inference_logprobs=[-1.0 if flag else 0.0 for flag in masks],
        temperatures=[1.0] * len(masks),
        sequence_lengths=[len(mask) for _, mask in sequences],
        envs=["e" if trace else "" for trace, _ in sequences],
        trace_ids=[trace for trace, _ in sequences],
    )


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


A, B, C = ("a", [False, True, True]), ("b", [False, False, True]), ("c", [False, True])


def logprobs(n: int) -> torch.Tensor:
    return (-torch.arange(n, dtype=torch.float32) / 8).requires_grad_()


def test_each_sample_gets_the_logprobs_of_its_own_sampled_tokens(tmp_path: Path) -> None:
    log = TokenLog(tmp_path / "trainer_0.jsonl", traces=10, attempt=2)
    log.note(from_micro_batch(row(A, B, ("", [False, False]))), logprobs(8))
    log.note(from_micro_batch(row(C)), logprobs(2))
    log.write(5)
    log.close()
    head = {"step": 5, "attempt": 2}
    assert lines(tmp_path / "trainer_0.jsonl") == [
        {"trace": "a", **head, "tokens": 3, "logprobs": [-0.125, -0.25]},
        {"trace": "b", **head, "tokens": 3, "logprobs": [-0.625]},
        {"trace": "c", **head, "tokens": 2, "logprobs": [-0.125]},
    ]


def test_only_the_first_traces_of_a_step_are_kept_with_all_their_samples(tmp_path: Path) -> None:
    log = TokenLog(tmp_path / "t.jsonl", traces=1, attempt=1)
    for step in (1, 2):
        log.note(from_micro_batch(row(A, B)), logprobs(6))
        log.note(from_micro_batch(row(C, A)), logprobs(5))
        log.write(step)
    assert [(line["step"], line["trace"]) for line in lines(tmp_path / "t.jsonl")] == [
        (1, "a"),
        (1, "a"),
        (2, "a"),
        (2, "a"),
    ]


def test_a_row_without_a_loss_says_nothing(tmp_path: Path) -> None:
    log = TokenLog(tmp_path / "t.jsonl", traces=4, attempt=1)
    log.note(from_micro_batch(row(("a", [False, False]))), logprobs(2))
    log.write(1)
    assert lines(tmp_path / "t.jsonl") == []


@pytest.mark.parametrize(("traces", "exists"), [(0, False), (3, True)])
def test_no_trace_wanted_is_no_file(tmp_path: Path, traces: int, exists: bool) -> None:
    log = open_token_log(RunDir(tmp_path, 3), 1, traces)
    assert (log is not None) is exists
    assert (tmp_path / "traces" / "trainer_1.jsonl").exists() is exists
