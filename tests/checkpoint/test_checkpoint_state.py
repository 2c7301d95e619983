"""Optimizer state, hyper-parameters and random state in one process, without DeepSpeed."""

from __future__ import annotations

import json
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from prl.checkpoint.optimizer_state import prepare, scalars, state_fragments
from prl.checkpoint.trainer_state import (
    check_optimizer,
    describe_optimizer,
    random_state,
    read_state,
    restore_rng,
    write_rng,
    write_state,
)
from prl.checkpoint.zero import Partition, Run, partitions


def flat_partition() -> Partition:
    """Rank 1 of 2 of a matrix `a` [3, 4] and a vector `b` [5]: elements 9..18 of 17, one of padding."""
    flat = torch.nn.Parameter(torch.arange(9.0, 18.0))
    return Partition(flat, 0, [Run("a", (3, 4), 9, 0, 3), Run("b", (5,), 0, 3, 5)])


def stepped(optimizer: torch.optim.Optimizer, flat: torch.Tensor, steps: int = 3) -> None:
    for step in range(steps):
        flat.grad = torch.linspace(-1, 1, flat.numel()) * (step + 1)
        optimizer.step()


def test_fragments_are_views_under_parameter_names():
    part = flat_partition()
    optimizer = torch.optim.AdamW([part.flat])
    stepped(optimizer, part.flat)
    found = state_fragments(optimizer, [part])
    assert sorted(found) == ["optim.exp_avg.a", "optim.exp_avg.b", "optim.exp_avg_sq.a", "optim.exp_avg_sq.b"]
    assert found["optim.exp_avg.a"].shape == (3, 4)
    chunk = found["optim.exp_avg.a"].__create_chunk_list__()[0]
    assert (tuple(chunk.offsets), tuple(chunk.sizes)) == ((2, 1), (1, 3))
    found["optim.exp_avg.b"]._run.fill_(7.0)
    assert optimizer.state[part.flat]["exp_avg"][3:8].tolist() == [7.0] * 5
    assert scalars(optimizer, [part])["b"] == {"step": {"dtype": "float32", "value": 3.0}}


@pytest.mark.parametrize(
    ("build", "keys"),
    [
        (lambda p: torch.optim.AdamW([p], amsgrad=True), {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (lambda p: torch.optim.AdamW([p], fused=True), {"exp_avg", "exp_avg_sq"}),
        (lambda p: torch.optim.SGD([p], lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda p: torch.optim.SGD([p], lr=0.1), set()),
        (lambda p: torch.optim.NAdam([p]), {"exp_avg", "exp_avg_sq"}),
    ],
    ids=["amsgrad", "fused", "momentum", "stateless", "nadam"],
)
def test_any_optimizer_continues_from_fragments_and_scalars(build, keys):
    part, other = flat_partition(), flat_partition()
    source, target = build(part.flat), build(other.flat)
    stepped(source, part.flat)
    saved = state_fragments(source, [part])
    assert {name.split(".")[1] for name in saved} == keys
    dtypes = {name: fragment.dtype for name, fragment in saved.items()}
    prepare(target, [other], dtypes, json.loads(json.dumps(scalars(source, [part]))))
    for name, fragment in state_fragments(target, [other]).items():
        fragment._run.copy_(saved[name]._run)
    with torch.no_grad():
        other.flat.copy_(part.flat)
    stepped(source, part.flat)
    stepped(target, other.flat)
    assert torch.equal(part.flat[:8], other.flat[:8])


def test_state_that_is_not_per_weight_is_refused():
    part = flat_partition()
    optimizer = torch.optim.SGD([part.flat], lr=0.1)
    optimizer.state[part.flat]["row_means"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=r"SGD keeps 'row_means' of shape \(3,\) for weights of shape \(9,\)"
    ):
        state_fragments(optimizer, [part])


def test_a_buffer_of_several_parameters_takes_the_largest_step():
    part = flat_partition()
    optimizer = torch.optim.AdamW([part.flat])
    steps = {
        name: {"step": {"dtype": "float32", "value": value}} for name, value in {"a": 2.0, "b": 5.0}.items()
    }
    prepare(optimizer, [part], {"optim.exp_avg.a": torch.bfloat16}, steps)
    state = optimizer.state[part.flat]
    assert state["step"].item() == 5.0 and state["step"].dtype == torch.float32
    assert state["exp_avg"].dtype == torch.bfloat16 and not state["exp_avg"].requires_grad


def test_state_of_unknown_parameters_creates_nothing():
    part = flat_partition()
    optimizer = torch.optim.AdamW([part.flat])
    prepare(optimizer, [part], {"optim.exp_avg.c": torch.float32}, {"c": {"step": 1}})
    assert optimizer.state[part.flat] == {}


def test_a_buffer_that_is_elsewhere_is_not_saved_as_empty():
    with pytest.raises(AssertionError, match="not in memory"):
        Run("a", (3, 4), 9, 0, 3).of(torch.empty(0))


def test_stage_0_in_16_bit_is_refused():
    """DeepSpeed then wraps the optimizer in one whose float32 weights cannot be reached."""
    engine = SimpleNamespace(
        module=torch.nn.Linear(2, 2), optimizer=object(), zero_optimization_stage=lambda: 0
    )
    with pytest.raises(ValueError, match=r"zero\.stage=1 does"):
        partitions(engine)


def optimizer_of(groups: int, **options) -> torch.optim.Optimizer:
    weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(groups)]
    return torch.optim.AdamW([{"params": [w]} for w in weights], **options)


def test_changed_hyper_parameters_are_logged(caplog):
    saved = json.loads(json.dumps(describe_optimizer(optimizer_of(1, lr=1e-3, betas=(0.9, 0.99)))))
    optimizer = optimizer_of(1, lr=5e-4, betas=(0.9, 0.95), weight_decay=0.5)
    with caplog.at_level(logging.INFO):
        check_optimizer(optimizer, saved)
    assert [record.getMessage() for record in caplog.records] == [
        "optimizer group 0: betas was [0.9, 0.99], is now [0.9, 0.95]",
        "optimizer group 0: weight_decay was 0.01, is now 0.5",
    ]
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_other_groups_are_refused():
    saved = describe_optimizer(optimizer_of(2))
    with pytest.raises(
        ValueError, match=r"AdamW with 2 parameter groups, the run's is AdamW with 1 .*skip_opt"
    ):
        check_optimizer(optimizer_of(1), saved)


def test_random_state_round_trip(tmp_path):
    def draw() -> list[float]:
        return [random.gauss(0, 1), float(np.random.standard_normal()), torch.randn(()).item()]

    draw()
    write_rng(tmp_path, 3, random_state())
    expected = [draw(), draw()]
    restore_rng(tmp_path, rank=3)
    assert [draw(), draw()] == expected
    restore_rng(tmp_path, rank=4)
    assert draw() not in expected


def test_state_file(tmp_path):
    write_state(tmp_path, {"extra": {"step": 3}})
    assert read_state(tmp_path) == {"format": 1, "extra": {"step": 3}}
    with pytest.raises(TypeError):
        write_state(tmp_path, {"extra": torch.zeros(2)})
    assert read_state(tmp_path)["extra"] == {"step": 3}
    (tmp_path / "trainer_state.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, this version of prl reads 1"):
        read_state(tmp_path)
    with pytest.raises(ValueError, match="is no trainer checkpoint"):
        read_state(tmp_path / "elsewhere")
