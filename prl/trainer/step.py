"""One optimizer step: rows of a batch -> the exact gradient of the global token mean -> an update."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence

import torch

from prl.config.loss import LossConfig
from prl.loss.batch import MicroBatchTensors, from_micro_batch
from prl.loss.components import compute_loss, count_members
from prl.orchestrator.packing import zero_loss_clone
from prl.records import MicroBatch
from prl.trainer.distributed import World, all_gather_json
from prl.trainer.engine import TrainEngine
from prl.trainer.stats import TokenStats, named_statistics


def train_step(
    engine: TrainEngine, micro_batches: Sequence[MicroBatch], loss_config: LossConfig, step: int
) -> dict[str, float]:
    """Do optimizer step `step` (from 1) on this rank's rows; returns its metrics on every rank. Collective.

    The loss is the sum over all rows of all ranks of each component, divided by the component's members in
    the whole global batch: how the batch is cut into rows and ranks does not change the gradient. Ranks may
    hold different numbers of rows; the missing ones are filled with rows without loss.
    """
    started = time.perf_counter()
    if engine.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(engine.device)
    rows, counts, tokens = _load(engine, micro_batches)
    loaded = time.perf_counter()
    stats = TokenStats()
    for row in rows:
        _forward_backward(engine, row, counts, loss_config, stats)
    info = engine.step(step)
    moments = stats.reduce(engine.world)
    finished = time.perf_counter()
    return {
        **named_statistics({name: found for name, found in moments.items() if name != "loss"}),
        "loss/mean": moments["loss"].total,
        "optim/lr": info.lr,
        "optim/grad_norm": info.grad_norm,
        "perf/throughput": tokens / (finished - started),
        "perf/peak_memory": _peak_memory_gib(engine.device),
        "time/load_data": loaded - started,
        "time/forward_backward": finished - loaded,
    }


def _load(
    engine: TrainEngine, micro_batches: Sequence[MicroBatch]
) -> tuple[list[MicroBatchTensors], dict[str, float], int]:
    """(rows on the device, as many on every rank; members per component and tokens of the global batch)."""
    if not micro_batches:
        raise ValueError("a rank got no micro batch: the batch must have at least one for each rank")
    rows = [from_micro_batch(micro, engine.device) for micro in micro_batches]
    members = _count(rows)
    own = {"rows": len(rows), "tokens": sum(map(_true_tokens, micro_batches)), "members": members}
    ranks = all_gather_json(own, engine.world)
    missing = max(rank["rows"] for rank in ranks) - len(rows)
    rows += [from_micro_batch(zero_loss_clone(micro_batches[0]), engine.device)] * missing
    counts = {name: sum(rank["members"][name] for rank in ranks) for name in members}
    return rows, counts, sum(rank["tokens"] for rank in ranks)


def _count(rows: Sequence[MicroBatchTensors]) -> dict[str, float]:
    counts = [count_members(row) for row in rows]
    return {name: sum(count[name] for count in counts) for name in counts[0]}


def _true_tokens(micro: MicroBatch) -> int:
    """Tokens that are neither padding nor a filler's."""
    return sum(size for size, env in zip(micro.sequence_lengths, micro.envs, strict=True) if env)


def _forward_backward(
    engine: TrainEngine,
    row: MicroBatchTensors,
    counts: dict[str, float],
    loss_config: LossConfig,
    stats: TokenStats,
) -> None:
    lengths = tuple(row.sequence_lengths)
    logprobs, entropy = engine.forward(row.input_ids, row.position_ids, row.temperatures, lengths)
    loss, metrics = compute_loss(row, logprobs, counts, loss_config)
    engine.backward(loss)
    stats.add("loss", loss)
    for name, values in metrics.items():
        stats.add(name, values)
    for env, positions in row.sampled.items():
        stats.add(f"entropy/{env}", entropy[positions])


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
    return " | ".join(parts)
