"""A trainer rank: publish weights, take a batch, make a step, publish again, until `max_steps`."""

from __future__ import annotations

import gc
import logging
import time
from itertools import count
from pathlib import Path

import torch

from prl.checkpoint.resolve import checkpoints_dir
from prl.config.schema import RlConfig, SftConfig
from prl.run_dir import RunDir
from prl.sync.filesystem import FilesystemPublisher
from prl.tracking.stream import MetricStream
from prl.trainer import checkpoints, distributed
from prl.trainer.engine import TrainEngine
from prl.trainer.receiver import BatchReceiver
from prl.trainer.step import log_line, train_step

log = logging.getLogger(__name__)


def main(config: RlConfig, run: RunDir, role: str) -> None:
    """Entry point of role `trainer/<rank>`. Returns when step `max_steps` is done and published.

    Step s trains batch s on the weights v(s-1) and yields v(s). v(s-1) of the first step is published before
    anything is waited for, because engines wait for weights and batches wait for engines.
    """
    if already_done(config):
        return
    engine, start = start_engine(config, run, role)
    stream = MetricStream(run.metric_file("trainer"), "trainer") if engine.world.rank == 0 else None
    publisher = FilesystemPublisher(run.broadcasts, config.sync) if engine.world.rank == 0 else None
    publish(engine, publisher, start)
    address = run.wait_for_address_blocking("orchestrator", config.cluster.start_timeout)
    receiver = BatchReceiver(address, engine.world.rank, engine.world.size)
    collect_garbage_rarely()
    for step in count(start + 1):
        metrics = one_step(config, run, engine, receiver, publisher, step)
        if stream:
            stream.log(metrics, step)
        if step % config.trainer.gc_interval == 0:
            gc.collect()
        if step == config.max_steps:
            break
    receiver.close()
    stop(engine, stream)


def one_step(
    config: RlConfig,
    run: RunDir,
    engine: TrainEngine,
    receiver: BatchReceiver,
    publisher: FilesystemPublisher | None,
    step: int,
) -> dict[str, float]:
    """Batch, optimizer step, weights, checkpoint; returns the metrics with the time each part took."""
    started = time.perf_counter()
    micro_batches = receiver.receive(step, config.trainer.dist_timeout)
    received = time.perf_counter()
    metrics = train_step(engine, micro_batches, config.loss, step)
    trained = time.perf_counter()
    publish(engine, publisher, step)
    published = time.perf_counter()
    metrics["time/wait_for_batch"] = received - started
    metrics["time/broadcast_weights"] = published - trained
    if checkpoints.is_due(config.ckpt, step, config.max_steps):
        where = checkpoints_dir(config.ckpt, run)
        checkpoints.save(engine, config.ckpt, where, step, timeout=config.sync.timeout)
        metrics["time/save_ckpt"] = time.perf_counter() - published
    metrics["time/step"] = time.perf_counter() - started
    if engine.world.rank == 0:
        log.info(log_line(step, metrics, engine.world))
    return metrics


def publish(engine: TrainEngine, publisher: FilesystemPublisher | None, version: int) -> None:
    """Publish v(version) from rank 0. Collective: the other ranks take part in gathering."""
    if publisher is None:
        for _ in engine.full_tensors():
            pass
        return
    weights = publisher.publish(version, engine.full_tensors())
    log.info("published v%d: %.1f MB, %s", version, weights.num_bytes / 1e6, weights.fingerprint)


def already_done(config: RlConfig | SftConfig) -> bool:
    """Whether the checkpoint to resume from is at or past `max_steps`, so that nothing is left to do."""
    if config.run.resume is None or config.max_steps is None:
        return False
    step = int(Path(config.run.resume).name.removeprefix("step_"))
    if step >= config.max_steps:
        log.info("the checkpoint is of step %d and max_steps is %d: nothing to train", step, config.max_steps)
    return step >= config.max_steps


def start_engine(config: RlConfig | SftConfig, run: RunDir, role: str) -> tuple[TrainEngine, int]:
    """(the engine of this rank, last finished step), joined with the other ranks and resumed if asked."""
    torch.set_num_threads(config.trainer.threads)
    torch.set_float32_matmul_precision("high")
    world = distributed.join(
        rank=int(role.rpartition("/")[2]),
        size=config.cluster.train_ranks,
        meeting_file=run.configs / "addresses" / "trainer.store",
        timeout=config.trainer.dist_timeout,
    )
    engine = TrainEngine(config, world, config.max_steps)
    if config.run.resume is None:
        return engine, 0
    return engine, checkpoints.restore(engine, config.ckpt, Path(config.run.resume))


def stop(engine: TrainEngine, stream: MetricStream | None) -> None:
    gc.enable()
    if stream:
        stream.close()
    engine.close()
    distributed.leave(engine.world)


def collect_garbage_rarely() -> None:
    """Collect by hand, so that ranks do not stop for it at different times; what is loaded now stays."""
    gc.collect()
    gc.freeze()
    gc.disable()
