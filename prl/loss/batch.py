"""A packed row as tensors. Everything that depends on data is decided here, on the host.

Membership of tokens is resolved from the lists before they are moved, so the loss can gather by index
and needs no device sync to know shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from prl.records import Component, MicroBatch

COMPONENTS: tuple[Component, ...] = get_args(Component)


class RowInputs(NamedTuple):
    """What a forward pass needs of a packed row, on one device; ids int64 [n], temperatures float32 [n]."""

    input_ids: Tensor
    position_ids: Tensor
    temperatures: Tensor
    sequence_lengths: tuple[int, ...]


class SequenceMembers(NamedTuple):
    """Where a sequence stands in its row, and which entries of a component's members are its own."""

    start: int
    length: int
    first_member: int
    num_members: int


@dataclass(slots=True)
class MicroBatchTensors:
    """One packed row of `n` tokens on one device; float streams are float32 [n], ids int64 [n].

    `members[c]` holds the positions (int64, ascending) that enter component c, `counts[c]` their share of
    its denominator, `sequences[c]` the sequences that have members. `policy` and `sampled` hold positions
    for metrics, under "all" and under each environment: sampled tokens that are rl or ref_kl members, and
    all sampled tokens.
    """

    input_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    advantages: Tensor
    inference_logprobs: Tensor
    temperatures: Tensor
    ref_logprobs: Tensor | None
    weights: dict[Component, Tensor]
    members: dict[Component, Tensor]
    counts: dict[Component, float]
    sequences: dict[Component, list[SequenceMembers]]
    policy: dict[str, Tensor]
    sampled: dict[str, Tensor]
    sequence_lengths: list[int]
    envs: list[str]
    trace_ids: list[str]

    def __len__(self) -> int:
        return len(self.input_ids)

    def describe(self, position: int) -> str:
        """The sample and the token within it that stand at a position of the row."""
        return _describe(position, self.sequence_lengths, self.trace_ids)


def row_inputs(micro: MicroBatch, device: torch.device | str = "cpu") -> RowInputs:
    """The part of a row that its forward pass can start with."""
    put = _mover(device)
    return RowInputs(
        put(np.asarray(micro.input_ids, dtype=np.int64)),
        put(np.asarray(micro.position_ids, dtype=np.int64)),
        put(np.asarray(micro.temperatures, dtype=np.float32)),
        tuple(micro.sequence_lengths),
    )


def count_row(micro: MicroBatch) -> dict[Component, float]:
    """`MicroBatchTensors.counts` of a row, without moving or checking anything."""
    weights = {c: getattr(micro, f"{c}_weights") for c in COMPONENTS}
    arrays = {
        f"{c}_weights": np.asarray(own, dtype=np.float32) for c, own in weights.items() if own is not None
    }
    flags = _member_flags(arrays, np.asarray(micro.loss_mask, dtype=bool))
    return _counts(flags, {c: arrays[f"{c}_weights"] for c in COMPONENTS if f"{c}_weights" in arrays})


def from_micro_batch(
    micro: MicroBatch, device: torch.device | str = "cpu", inputs: RowInputs | None = None
) -> MicroBatchTensors:
    """Resolves members and moves the row to `device`; `inputs` are those of the row that are there already.

    Raises ValueError, naming the sample and the token, for a ref_kl token without reference logprobs and
    for a value that is not finite where it is used.
    """
    n = len(micro)
    assert sum(micro.sequence_lengths) == n, f"sequence lengths {micro.sequence_lengths} do not sum to {n}"
    arrays = _float_arrays(micro)
    mask = np.asarray(micro.loss_mask, dtype=bool)
    flags = _member_flags(arrays, mask)
    _check_members(micro, arrays, flags)
    put = _mover(device)
    inputs = inputs or row_inputs(micro, device)
    weights = {c: arrays[f"{c}_weights"] for c in COMPONENTS if f"{c}_weights" in arrays}
    members = {c: np.flatnonzero(flags[c]) for c in COMPONENTS}
    policy = (flags["rl"] | flags["ref_kl"]) & mask
    return MicroBatchTensors(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        loss_mask=put(mask),
        advantages=put(arrays["advantages"]),
        inference_logprobs=put(arrays["inference_logprobs"]),
        temperatures=inputs.temperatures,
        ref_logprobs=put(arrays["ref_logprobs"]) if "ref_logprobs" in arrays else None,
        weights={c: put(stream) for c, stream in weights.items()},
        members={c: put(positions) for c, positions in members.items()},
        counts=_counts(flags, weights),
        sequences={c: _sequences(positions, micro.sequence_lengths) for c, positions in members.items()},
        policy={key: put(found) for key, found in _by_env(micro, policy).items()},
        sampled={key: put(found) for key, found in _by_env(micro, mask).items()},
        sequence_lengths=list(micro.sequence_lengths),
        envs=list(micro.envs),
        trace_ids=list(micro.trace_ids),
    )


def _mover(device: torch.device | str) -> Callable[[np.ndarray], Tensor]:
    """Moves arrays to `device`. A GPU copies from pinned memory: from any other the host would wait for all
    work that was launched before."""
    if torch.device(device).type != "cuda":
        return lambda array: torch.from_numpy(array).to(device)
    return lambda array: torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _float_arrays(micro: MicroBatch) -> dict[str, np.ndarray]:
    names = ("advantages", "inference_logprobs", "ref_logprobs")
    streams = {name: getattr(micro, name) for name in (*names, *(f"{c}_weights" for c in COMPONENTS))}
    arrays = {
        name: np.asarray(values, dtype=np.float32) for name, values in streams.items() if values is not None
    }
    assert len(micro.temperatures) == len(micro), f"{len(micro.temperatures)} temperatures in a row"
    for name, array in arrays.items():
        assert array.shape == (len(micro),), f"{name} has shape {array.shape} in a row of {len(micro)} tokens"
    return arrays


def _member_flags(arrays: dict[str, np.ndarray], mask: np.ndarray) -> dict[Component, np.ndarray]:
    """rl: mask and weight; ce and ref_kl: weight alone, the mask is not consulted."""
    absent = np.zeros_like(mask)
    return {
        "rl": mask & (arrays["rl_weights"] != 0) if "rl_weights" in arrays else mask,
        "ce": arrays["ce_weights"] != 0 if "ce_weights" in arrays else absent,
        "ref_kl": arrays["ref_kl_weights"] != 0 if "ref_kl_weights" in arrays else absent,
    }


def _counts(
    flags: dict[Component, np.ndarray], weights: dict[Component, np.ndarray]
) -> dict[Component, float]:
    counts = {component: float(np.count_nonzero(members)) for component, members in flags.items()}
    if "rl" in weights:
        counts["rl"] = float(weights["rl"][flags["rl"]].sum(dtype=np.float64))
    return counts


def _sequences(members: np.ndarray, lengths: Sequence[int]) -> list[SequenceMembers]:
    starts = [0, *accumulate(lengths)]
    bounds = np.searchsorted(members, starts).tolist()
    found = zip(starts, lengths, bounds, bounds[1:], strict=False)
    return [SequenceMembers(start, n, first, last - first) for start, n, first, last in found if last > first]


def _by_env(micro: MicroBatch, flags: np.ndarray) -> dict[str, np.ndarray]:
    env_of_token = np.repeat(np.arange(len(micro.envs)), micro.sequence_lengths)
    found = {"all": np.flatnonzero(flags)}
    for env in sorted(set(micro.envs) - {""}):
        own = np.asarray([name == env for name in micro.envs])
        found[env] = np.flatnonzero(flags & own[env_of_token])
    return found


def _check_members(
    micro: MicroBatch, arrays: dict[str, np.ndarray], flags: dict[Component, np.ndarray]
) -> None:
    starts = [0, *accumulate(micro.sequence_lengths)][:-1]
    anywhere = flags["rl"] | flags["ce"] | flags["ref_kl"]
    for start, length in zip(starts, micro.sequence_lengths, strict=True):
        assert not (length and anywhere[start]), "the first token of a sequence must not enter the loss"
    if "ref_logprobs" not in arrays and flags["ref_kl"].any():
        where = _describe(int(np.argmax(flags["ref_kl"])), micro.sequence_lengths, micro.trace_ids)
        raise ValueError(f"{where}: ref_kl weight without reference logprobs; opd and opsd provide them")
    used = {
        "inference_logprobs": flags["rl"] | flags["ref_kl"],
        "advantages": flags["rl"],
        "ref_logprobs": flags["ref_kl"],
        **{f"{component}_weights": flags[component] for component in COMPONENTS},
    }
    for name, members in used.items():
        bad = members & ~np.isfinite(arrays[name]) if name in arrays else np.zeros_like(members)
        if bad.any():
            position = int(np.argmax(bad))
            where = _describe(position, micro.sequence_lengths, micro.trace_ids)
            raise ValueError(f"{where}: {name} is {arrays[name][position]}; it must be finite")


def _describe(position: int, lengths: Sequence[int], trace_ids: Sequence[str]) -> str:
    for length, trace_id in zip(lengths, trace_ids, strict=True):
        if position < length:
            return f"trace {trace_id!r}, token {position} of its sample"
        position -= length
    raise AssertionError("the position is outside of the row")
