"""What a step reports, and how it treats rows that are missing or without loss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainer_lab import IPO, make_config, make_sequences, pack

from prl.config import training
from prl.orchestrator.packing import zero_loss_clone
from prl.trainer import step as step_module
from prl.trainer.distributed import World
from prl.trainer.engine import TrainEngine
from prl.trainer.step import log_line, train_step

SGD = training.SgdConfig(lr=0.01, momentum=0.0, nesterov=False)


@pytest.fixture
def engine(model_dir: Path, world: World) -> Iterator[TrainEngine]:
    made = TrainEngine(make_config(model_dir, SGD), world, None)
    yield made
    made.close()


def weights(engine: TrainEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.full_tensors()}


def test_metrics_have_the_promised_names(engine: TrainEngine) -> None:
    metrics = train_step(engine, [pack(make_sequences(0, ["rl", "rl", "ce"]))], IPO, 1)
    promised = {
        *(f"{name}/{env}/{s}" for name in ("entropy", "mismatch_kl") for env in ("all", "env0", "env1")
          for s in ("mean", "std", "max")),
        *(f"{name}/{s}" for name in ("is_masked", "unmasked_mismatch_kl") for s in ("mean", "max")),
        *("kl_ent_ratio/mean", "loss/mean", "nll/mean", "optim/lr", "optim/grad_norm"),
        *("perf/throughput", "perf/peak_memory", "time/load_data", "time/forward_backward"),
    }  # fmt: skip
    assert promised <= metrics.keys()
    assert all(isinstance(value, float) for value in metrics.values())
    assert 0 < metrics["perf/peak_memory"] < 100
    line = log_line(1, metrics, engine.world)
    assert "loss" in line and "mismatch KL" in line and "1 ranks" in line


def test_a_batch_of_supervised_rows_alone_has_no_policy_metrics(engine: TrainEngine) -> None:
    metrics = train_step(engine, [pack(make_sequences(0, ["ce", "ce"]))], IPO, 1)
    assert metrics["nll/mean"] > 0 and metrics["entropy/all/mean"] > 0
    assert not [name for name in metrics if "mismatch" in name or "is_masked" in name]
    assert "mismatch KL" not in log_line(1, metrics, engine.world)


def test_the_loss_has_the_statistics_of_its_tokens(engine: TrainEngine) -> None:
    """Of supervised tokens of one weight they are those of the nll; its mean is the loss itself."""
    rows = [pack(make_sequences(seed, ["ce", "none", "ce"])) for seed in range(2)]
    weight = max(rows[0].ce_weights)
    metrics = train_step(engine, rows, IPO, 1)
    for statistic in ("mean", "median", "std", "min", "max"):
        assert metrics[f"loss/{statistic}"] == pytest.approx(weight * metrics[f"nll/{statistic}"], rel=1e-5)
    assert metrics["loss/min"] < metrics["loss/median"] < metrics["loss/max"]


def test_a_row_without_members_changes_nothing(engine: TrainEngine, model_dir: Path, world: World) -> None:
    rows = [pack(make_sequences(0, ["rl", "ce"]))]
    alone = train_step(engine, rows, IPO, 1)
    other = TrainEngine(make_config(model_dir, SGD), world, None)
    idle = pack(make_sequences(3, ["none", "none"]))
    beside = train_step(other, [idle, *rows, zero_loss_clone(rows[0])], IPO, 1)
    assert beside["loss/mean"] == pytest.approx(alone["loss/mean"], abs=1e-7)
    for name, tensor in weights(engine).items():
        torch.testing.assert_close(weights(other)[name], tensor, rtol=0, atol=1e-7)
    other.close()


def test_a_batch_without_any_member_moves_no_weight(engine: TrainEngine) -> None:
    before = weights(engine)
    metrics = train_step(engine, [pack(make_sequences(0, ["none"] * 2))], IPO, 1)
    assert metrics["loss/mean"] == 0.0 and metrics["optim/grad_norm"] == 0.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(engine).items())


def test_missing_rows_are_filled_to_the_count_of_the_other_ranks(
    engine: TrainEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks must make the same number of forward and backward calls, or gloo and NCCL abort."""
    calls = []
    forward = engine.forward
    monkeypatch.setattr(engine, "forward", lambda *args: calls.append(1) or forward(*args))

    def gather(value: dict, world: World) -> list[dict]:
        members = {"rl": 2.0, "ce": 0.0, "ref_kl": 0.0}
        return (
            [value, {"rows": 4, "tokens": 100, "flops": 1e3, "members": members}]
            if "rows" in value
            else [value]
        )

    monkeypatch.setattr(step_module, "all_gather_json", gather)
    train_step(engine, [pack(make_sequences(0, ["rl"]))], IPO, 1)
    assert len(calls) == 4


def test_throughput_counts_neither_padding_nor_fillers(engine: TrainEngine) -> None:
    row = pack(make_sequences(0, ["rl", "rl"]))
    true_tokens = len(row)
    padded = pack([*make_sequences(0, ["rl", "rl"]), *make_sequences(1, ["none"])])
    padded.envs[-1] = ""
    metrics = train_step(engine, [padded, zero_loss_clone(row)], IPO, 1)
    seconds = metrics["time/load_data"] + metrics["time/forward_backward"]
    assert metrics["perf/throughput"] * seconds == pytest.approx(true_tokens, rel=1e-6)


def test_a_rank_without_rows_is_an_error(engine: TrainEngine) -> None:
    with pytest.raises(ValueError, match="no micro batch"):
        train_step(engine, [], IPO, 1)
