"""A rank of `prl sft`: batches of conversations through the same engine and step as `prl rl`."""

from __future__ import annotations

import gc
import logging
import math
import time
from itertools import count
from typing import Any

from prl.checkpoint.resolve import checkpoints_dir
from prl.config.loss import IpoConfig
from prl.config.schema import SftConfig
from prl.model_path import resolve_model_path
from prl.orchestrator.cost import RowCost, cost_of_model
from prl.orchestrator.packing import pack_batch
from prl.records import MicroBatch
from prl.run_dir import RunDir
from prl.sft.data import Dataset, build_dataset, render
from prl.sft.export import export_weights
from prl.tracking.stream import MetricStream
from prl.trainer import checkpoints
from prl.trainer.engine import TrainEngine
from prl.trainer.main import already_done, collect_garbage_rarely, start_engine, stop
from prl.trainer.step import log_line, train_step

log = logging.getLogger(__name__)

NO_POLICY_TOKENS = IpoConfig()
"""The trust region of policy-gradient tokens, of which there are none here: all loss is cross-entropy."""


def main(config: SftConfig, run: RunDir, role: str) -> None:
    """Entry point of role `trainer/<rank>`: trains to `max_steps`, then writes `weights/` of the run."""
    if already_done(config):
        return
    engine, start = start_engine(config, run, role)
    source = resolve_model_path(config.model)
    batches = Batches(config, engine.world.rank, engine.world.size)
    stream = MetricStream(run.metric_file("trainer"), "trainer") if engine.world.rank == 0 else None
    collect_garbage_rarely()
    for step in count(start + 1):
        metrics = one_step(config, run, engine, batches, step)
        if stream:
            stream.log(metrics, step)
        if step % config.trainer.gc_interval == 0:
            gc.collect()
        if step == config.max_steps:
            break
    export_weights(engine, source, run.path / "weights")
    stop(engine, stream)


def one_step(
    config: SftConfig, run: RunDir, engine: TrainEngine, batches: Batches, step: int
) -> dict[str, float]:
    """Batch, optimizer step, checkpoint; returns the metrics with the time each part took."""
    started = time.perf_counter()
    rows = batches.rows(step)
    prepared = time.perf_counter()
    metrics = train_step(engine, rows, NO_POLICY_TOKENS, step)
    trained = time.perf_counter()
    metrics["loss/perplexity"] = math.exp(min(metrics["nll/mean"], 700.0))
    metrics["progress/num_samples"] = step * config.data.batch_size
    metrics["time/wait_for_batch"] = prepared - started
    if checkpoints.is_due(config.ckpt, step, config.max_steps):
        where = checkpoints_dir(config.ckpt, run)
        checkpoints.save(
            engine, config.ckpt, where, step, parts=("trainer",), timeout=config.trainer.dist_timeout
        )
        metrics["time/save_ckpt"] = time.perf_counter() - trained
    metrics["time/step"] = time.perf_counter() - started
    if engine.world.rank == 0:
        log.info(log_line(step, metrics, engine.world))
    return metrics


class Batches:
    """Packed rows of one rank, step by step. Every rank renders the whole batch and takes its part."""

    def __init__(self, config: SftConfig, rank: int, ranks: int) -> None:
        from transformers import AutoTokenizer

        path = resolve_model_path(config.model)
        self._dataset: Dataset = build_dataset(config.data, config.seed)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(path, local_files_only=True)
        self._cost: RowCost = cost_of_model(path)
        self._env: str = config.data.name
        self._seq_len = config.trainer.seq_len
        self._rank, self._ranks = rank, ranks

    def rows(self, step: int) -> list[MicroBatch]:
        """This rank's rows of batch `step` (from 1), as many as every other rank's."""
        samples = [render(example, self._tokenizer, self._env) for example in self._dataset.batch(step)]
        packed = pack_batch(samples, ranks=self._ranks, seq_len=self._seq_len, cost=self._cost)
        return packed[self._rank]
