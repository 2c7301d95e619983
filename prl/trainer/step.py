"""One optimizer step: rows of a batch -> the exact gradient of the global token mean -> an update."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from prl.config.loss import LossConfig
from prl.loss.batch import MicroBatchTensors, count_row, from_micro_batch, row_inputs
from prl.loss.components import FiniteCheck, NonFiniteLoss, compute_loss
from prl.orchestrator.packing import zero_loss_clone
from prl.records import MicroBatch
from prl.trainer.distributed import World, all_gather_json
from prl.trainer.engine import TrainEngine
from prl.trainer.flops import peak_flops, training_flops
from prl.trainer.stats import TOTAL_LOSS, TokenStats, named_statistics
from prl.trainer.token_log import TokenLog

log = logging.getLogger(__name__)


def train_step(
    engine: TrainEngine,
    micro_batches: Sequence[MicroBatch],
    loss_config: LossConfig,
    step: int,
    *,
    skip_non_finite: bool = False,
    token_log: TokenLog | None = None,
) -> dict[str, float]:
    """Do optimizer step `step` (from 1) on this rank's rows; returns its metrics on every rank. Collective.

    The loss is the sum over all rows of all ranks of each component, divided by the component's members in
    the whole global batch: how the batch is cut into rows and ranks does not change the gradient. Ranks may
    hold different numbers of rows; the missing ones are filled with rows without loss. Ranks that share rows
    pass the same ones, of which the first of them tells. `skip_non_finite`
    leaves a row out whose loss is not finite, instead of raising, and tells their number in `loss/nan_count`.
    `token_log` keeps the logprobs of some traces.
    """
    if not micro_batches:
        raise ValueError("a rank got no micro batch: the batch must have at least one for each rank")
    started = time.perf_counter()
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
    fillers, counts, work = _agree(engine, micro_batches)
    loaded = time.perf_counter()
    stats, checks, left_out, tells = TokenStats(), list[FiniteCheck](), 0, engine.world.leads
    idle = [zero_loss_clone(micro_batches[0])] * fillers if fillers else []
    for micro in [*micro_batches, *idle]:
        inputs = row_inputs(micro, engine.device)
        outputs = engine.forward(*inputs)
        row = from_micro_batch(micro, engine.device, inputs)  # while a GPU works on the forward pass
        for name, values in engine.routing.take(_true_tokens(micro)).items():
            stats.add(name, values)
        if token_log:
            token_log.note(row, outputs[0])
        left_out += not _backward(
            engine, row, outputs, counts, loss_config, stats, None if skip_non_finite else checks
        )
    del outputs
    stats.settle()
    info = engine.step(step, Verdict(checks, engine.device))
    moments = stats.reduce(engine.world)
    finished = time.perf_counter()
    told = {"loss/nan_count": float(_total(left_out * tells, engine))} if skip_non_finite else {}
    return {
        **told,
        **named_statistics(moments),
        "loss/mean": moments[TOTAL_LOSS].total,
        "optim/lr": info.lr,
        "optim/grad_norm": info.grad_norm,
        **_speed(engine, work, finished - started),
        "perf/peak_memory": _peak_memory_gib(engine.device),
        "time/load_data": loaded - started,
        "time/forward_backward": finished - loaded,
    }


class Verdict:
    """Whether the losses of all rows are finite, on its way to the host; the call raises if one is not.

    Waits for work that was launched before it was made, not for work launched since.
    """

    def __init__(self, checks: Sequence[FiniteCheck], device: torch.device) -> None:
        self._checks = checks
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        flags = torch.stack([check.finite for check in checks]) if checks else torch.ones(1, dtype=torch.bool)
        self._flags = torch.empty(flags.shape, dtype=torch.bool, pin_memory=self._event is not None)
        self._flags.copy_(flags, non_blocking=True)
        if self._event:
            self._event.record()

    def __call__(self) -> None:
        """Raises NonFiniteLoss, naming the sample and the token."""
        if self._event:
            self._event.synchronize()
        for check, finite in zip(self._checks, self._flags.tolist(), strict=False):
            if not finite:
                check.explain()


def _agree(
    engine: TrainEngine, micro_batches: Sequence[MicroBatch]
) -> tuple[int, dict[str, float], dict[str, float]]:
    """(rows that this rank lacks; members per component, true tokens and FLOPs of the global batch)."""
    members = [count_row(micro) for micro in micro_batches]
    own = {
        "rows": len(micro_batches),
        "members": {name: sum(row[name] for row in members) for name in members[0]},
        "tokens": sum(map(_true_tokens, micro_batches)),
        "flops": training_flops(engine.cost, [micro.sequence_lengths for micro in micro_batches]),
    }
    ranks = all_gather_json(own, engine.world)[:: engine.world.sequence]
    missing = max(rank["rows"] for rank in ranks) - len(micro_batches)
    counts = {name: sum(rank["members"][name] for rank in ranks) for name in own["members"]}
    return missing, counts, {name: sum(rank[name] for rank in ranks) for name in ("tokens", "flops")}


def _speed(engine: TrainEngine, work: dict[str, float], seconds: float) -> dict[str, float]:
    """True tokens a second, of all ranks and of one, and MFU in percent where the device's peak is known."""
    ranks, peak = engine.world.size, peak_flops(engine.device)
    found = {
        "perf/throughput": work["tokens"] / seconds,
        "perf/throughput_per_gpu": work["tokens"] / seconds / ranks,
    }
    if peak is not None and work["flops"]:
        found["perf/mfu"] = 100 * work["flops"] / (seconds * peak * ranks)
    return found


def _true_tokens(micro: MicroBatch) -> int:
    """Tokens that are neither padding nor a filler's."""
    return sum(size for size, env in zip(micro.sequence_lengths, micro.envs, strict=True) if env)


def _backward(
    engine: TrainEngine,
    row: MicroBatchTensors,
    outputs: tuple[Tensor, Tensor],
    counts: dict[str, float],
    loss_config: LossConfig,
    stats: TokenStats,
    checks: list[FiniteCheck] | None,
) -> bool:
    """Whether the row counts. Its check is left to `checks`; with None it is made here, which waits for the
    device, and a row whose loss is not finite has no gradient.
    """
    logprobs, entropy = outputs
    try:
        loss, metrics = compute_loss(row, logprobs, counts, loss_config, checks)
    except NonFiniteLoss as error:
        log.warning("a row is left out: %s", error)
        _backward_of_nothing(engine, stats)
        return False
    engine.backward(loss)
    engine.routing.forget()
    if not engine.world.leads:
        return True
    stats.add(TOTAL_LOSS, loss)
    for name, values in metrics.items():
        stats.add(name, values)
    for env, positions in row.sampled.items():
        stats.add(f"entropy/{env}", entropy[positions])
    return True


def _total(count: int, engine: TrainEngine) -> int:
    return sum(all_gather_json(count, engine.world))


def _backward_of_nothing(engine: TrainEngine, stats: TokenStats) -> None:
    """The backward pass that the other ranks wait for, of two tokens and without a gradient."""
    positions = torch.arange(2, device=engine.device)
    logprobs, _ = engine.forward(
        torch.zeros_like(positions), positions, torch.ones_like(positions).float(), (2,)
    )
    loss = logprobs.sum() * 0.0
    engine.backward(loss)
    if engine.world.leads:
        stats.add(TOTAL_LOSS, loss)


def _peak_memory_gib(device: torch.device) -> float:
    """Of this rank: device memory of the step, or on CPUs resident memory since the process started."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def log_line(step: int, metrics: dict[str, float], world: World) -> str:
    """The step for the log file, in one line."""
    parts = [f"step {step}", f"loss {metrics['loss/mean']:.4f}"]
    for label, key in (("entropy", "entropy/all/mean"), ("mismatch KL", "mismatch_kl/all/mean")):
        if key in metrics:
            parts.append(f"{label} {metrics[key]:.4f}")
    parts.append(f"grad norm {metrics['optim/grad_norm']:.3f}")
    parts.append(f"lr {metrics['optim/lr']:.2e}")
    parts.append(f"{metrics['perf/throughput']:.0f} tokens/s on {world.size} ranks")
    if "perf/mfu" in metrics:
        parts.append(f"MFU {metrics['perf/mfu']:.1f} %")
    parts.append(f"peak {metrics['perf/peak_memory']:.1f} GiB")
    return " | ".join(parts)
