"""What a step takes of a row before the rest: inputs, counts, and a check that is left for later."""

from __future__ import annotations

import math

import pytest
import torch
from loss_builders import row, sample

from prl.config.loss import IpoConfig
from prl.loss.batch import count_row, from_micro_batch, row_inputs
from prl.loss.components import FiniteCheck, NonFiniteLoss, compute_loss, count_members

PLAIN = sample([-0.5, -0.2], trace_id="plain", advantages=[1.0, -1.0])
WEIGHTED = sample([-0.5, -0.2, -0.9], trace_id="w", advantages=[1.0, 2.0, 3.0], rl_weights=[0.5, 0.0, 0.25])
TAUGHT = sample([-0.1], trace_id="ce", advantages=[0.0], rl_weights=[0.0], ce_weights=[0.3])


@pytest.mark.parametrize("members", [[PLAIN], [WEIGHTED, PLAIN], [TAUGHT, WEIGHTED]])
def test_rows_are_counted_from_their_lists(members):
    micro = row(members, padding=2)
    assert count_row(micro) == count_members(from_micro_batch(micro))


def test_counts_by_hand():
    assert count_row(row([WEIGHTED, TAUGHT])) == {"rl": 0.75, "ce": 1.0, "ref_kl": 0.0}


def test_inputs_that_are_there_are_not_moved_again():
    micro = row([PLAIN, WEIGHTED])
    inputs = row_inputs(micro)
    assert inputs.input_ids.tolist() == micro.input_ids and inputs.input_ids.dtype == torch.int64
    assert inputs.position_ids.tolist() == [0, 1, 2, 0, 1, 2, 3] and inputs.sequence_lengths == (3, 4)
    assert inputs.temperatures.tolist() == micro.temperatures and inputs.temperatures.dtype == torch.float32
    tensors = from_micro_batch(micro, inputs=inputs)
    assert tensors.input_ids is inputs.input_ids and tensors.temperatures is inputs.temperatures
    fresh = from_micro_batch(micro)
    assert torch.equal(fresh.position_ids, tensors.position_ids)
    assert torch.equal(fresh.members["rl"], tensors.members["rl"])


def test_a_check_can_wait():
    micro = from_micro_batch(row([PLAIN, WEIGHTED]))
    logprobs = torch.tensor([0.0, -0.5, -0.2, 0.0, -0.5, -0.2, math.inf], requires_grad=True)
    later: list[FiniteCheck] = []
    loss, _ = compute_loss(micro, logprobs, count_members(micro), IpoConfig(), later)
    assert loss.requires_grad and [bool(check.finite) for check in later] == [False]
    with pytest.raises(NonFiniteLoss, match=r"'w', token 3 .*logprob is inf"):
        later[0].explain()
    good = logprobs.detach().nan_to_num(posinf=-1.0)
    compute_loss(micro, good, count_members(micro), IpoConfig(), later)
    assert bool(later[1].finite)
    later[1].explain()
