"""A trainer rank: publish weights, take a batch, make a step, publish again, until `max_steps`."""

from __future__ import annotations

import gc
import logging
import time
from itertools import count
from pathlib import Path

import torch

from prl.checkpoint.marker import PARTS, step_dir
from prl.checkpoint.resolve import checkpoints_dir
from prl.checkpoint.retention import disk
from prl.config.schema import RlConfig, SftConfig
from prl.run_dir import RunDir
from prl.sync.publishers import Publisher, make_publisher
from prl.tracking.stream import MetricStream
from prl.trainer import checkpoints, distributed
from prl.trainer.engine import TrainEngine
from prl.trainer.lora import adapter_config, peft_config
from prl.trainer.receiver import Receiver, open_receiver
from prl.trainer.step import log_line, train_step
from prl.trainer.token_log import TokenLog, open_token_log

log = logging.getLogger(__name__)

WARN_STEPS = 10
"""Steps from one possible warning to the next."""


def main(config: RlConfig, run: RunDir, role: str) -> None:
    """Entry point of role `trainer/<rank>`. Returns when step `max_steps` is done and published.

    Step s trains batch s on the weights v(s-1) and yields v(s). v(s-1) of the first step is published before
    anything is waited for, because engines wait for weights and batches wait for engines.
    """
    if already_done(config):
        return
    engine, start = start_engine(config, run, role)
    stream = MetricStream(run.metric_file("trainer"), "trainer") if engine.world.rank == 0 else None
    publisher = make_publisher(run.broadcasts, config.sync, engine.world.rank, engine.device)
    publish(engine, publisher, start)
    address = run.wait_for_address_blocking("orchestrator", config.cluster.start_timeout)
    receiver = open_receiver(address, engine.world.rank, engine.world.size)
    traces_to_log = config.tracking.token_logprobs if engine.world.leads else 0
    token_log = open_token_log(run, engine.world.rank, traces_to_log)
    if config.trainer.gc_interval is not None:
        collect_garbage_rarely()
    for step in count(start + 1):
        metrics = one_step(config, run, engine, receiver, publisher, step, token_log)
        if stream:
            stream.log(metrics, step)
        if config.trainer.gc_interval is not None and step % config.trainer.gc_interval == 0:
            gc.collect()
        if step == config.max_steps:
            break
        if stop_on_request(config, run, engine, step):
            break
    receiver.close()
    stop(engine, stream)


def one_step(
    config: RlConfig,
    run: RunDir,
    engine: TrainEngine,
    receiver: Receiver,
    publisher: Publisher,
    step: int,
    token_log: TokenLog | None = None,
) -> dict[str, float]:
    """Batch, optimizer step, weights, checkpoint; returns the metrics with the time each part took."""
    started = time.perf_counter()
    micro_batches = receiver.receive(step, config.trainer.dist_timeout)
    received = time.perf_counter()
    metrics = train_step(engine, micro_batches, config.loss, step, token_log=token_log)
    trained = time.perf_counter()
    publish(engine, publisher, step)
    published = time.perf_counter()
    if token_log:  # while the engines load the weights
        token_log.write(step)
    metrics["time/wait_for_batch"] = received - started
    metrics["time/broadcast_weights"] = published - trained
    if checkpoints.is_due(config.ckpt, step, config.max_steps):
        where = checkpoints_dir(config.ckpt, run)
        checkpoints.save(engine, config.ckpt, where, step, timeout=config.sync.timeout)
        metrics["time/save_ckpt"] = time.perf_counter() - published
    metrics |= disk(checkpoints_dir(config.ckpt, run)) if config.ckpt.interval or config.ckpt.at_end else {}
    metrics["time/step"] = time.perf_counter() - started
    if engine.world.rank == 0:
        log.info(log_line(step, metrics, engine.world))
        if step % WARN_STEPS == 0 and (text := waited_mostly(metrics)):
            log.warning("step %d: %s", step, text)
    return metrics


def waited_mostly(metrics: dict[str, float]) -> str | None:
    """What to say of a step that waited for its batch longer than everything else took."""
    waited, total = metrics["time/wait_for_batch"], metrics["time/step"]
    if waited <= total - waited:
        return None
    return f"{waited:.1f} of {total:.1f} s went into waiting for rollouts; inference is the bottleneck"


def stop_on_request(config: RlConfig, run: RunDir, engine: TrainEngine, step: int) -> bool:
    """Whether to end after `step` because the launcher asked for it; the checkpoint is then complete."""
    where = checkpoints_dir(config.ckpt, run)

    def make() -> None:
        checkpoints.save(engine, config.ckpt, where, step, timeout=config.sync.timeout)

    return checkpoints.save_on_request(run, engine.world, step_dir(where, step), PARTS, make)


def publish(engine: TrainEngine, publisher: Publisher, version: int) -> None:
    """Publish v(version) from rank 0. Collective: the other ranks take part in gathering."""
    alone = engine.publishes_adapter
    tensors = engine.adapter_tensors if alone else engine.full_tensors
    adapter = adapter_config(engine.model) if alone else None
    if weights := publisher.publish(version, tensors, adapter and peft_config(adapter)):
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
        sequence=config.trainer.sequence_parallel,
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
