"""A rank of `prl sft`: rows of conversations through the same engine and step as `prl rl`."""

from __future__ import annotations

import gc
import logging
from itertools import count
from pathlib import Path
from typing import Any

from prl.checkpoint.marker import step_dir
from prl.checkpoint.resolve import checkpoints_dir
from prl.checkpoint.retention import disk
from prl.checkpoint.trainer_state import read_state
from prl.config.loss import IpoConfig
from prl.config.schema import SftConfig
from prl.model_path import resolve_model_path
from prl.run_dir import RunDir
from prl.sft.export import export_weights
from prl.sft.feed import FitFeed, RowFeed, open_feed
from prl.sft.metrics import Clock, Speed, progress
from prl.sft.schedule import publishes
from prl.sft.validation import Validation, perplexity
from prl.sync.publishers import Publisher, make_publisher
from prl.tracking.stream import MetricStream
from prl.trainer import checkpoints
from prl.trainer.distributed import all_gather_json
from prl.trainer.engine import TrainEngine
from prl.trainer.main import already_done, collect_garbage_rarely, publish, start_engine, stop
from prl.trainer.step import log_line, train_step

log = logging.getLogger(__name__)

NO_POLICY_TOKENS = IpoConfig()
"""The trust region of policy-gradient tokens, of which there are none here: all loss is cross-entropy."""


def main(config: SftConfig, run: RunDir, role: str) -> None:
    """Entry point of role `sft/<rank>`: trains to `max_steps`, then writes `weights/` of the run if asked."""
    if already_done(config):
        return
    engine, start = start_engine(config, run, role)
    training = Training(config, run, engine)
    stream = MetricStream(run.metric_file("trainer"), "trainer") if engine.world.rank == 0 else None
    training.publish(start)
    if (told := training.validate(start)) and stream:
        stream.log(told, start)
    if config.trainer.gc_interval is not None:
        collect_garbage_rarely()
    stopped = False
    for step in count(start + 1):
        metrics = training.step(step)
        if stream:
            stream.log(metrics, step)
        if config.trainer.gc_interval is not None and step % config.trainer.gc_interval == 0:
            gc.collect()
        if step == config.max_steps:
            break
        if stopped := training.stop_on_request(step):
            break
    training.close()
    if config.export.at_end and not stopped:
        export_weights(engine, resolve_model_path(config.model), run.path / "weights", step)
    stop(engine, stream)


class Training:
    """The steps of one rank: data, engine, validation, checkpoints."""

    def __init__(self, config: SftConfig, run: RunDir, engine: TrainEngine) -> None:
        self._config, self._run, self._engine = config, run, engine
        self._checkpoints = checkpoints_dir(config.ckpt, run)
        states = data_states(config)
        self._feed: RowFeed | FitFeed = open_feed(
            config, engine.world.data_rank, engine.world.data_size, states
        )
        self._validation = Validation(config, engine) if config.val.data else None
        self._speed = Speed(engine)
        self._publisher = self._make_publisher(run)

    def step(self, step: int) -> dict[str, float]:
        """Batch, optimizer step, validation, checkpoint; the metrics, with the time each part took."""
        clock, engine = Clock(), self._engine
        rows = self._feed.batch()
        waited = clock.lap()
        metrics = train_step(engine, rows, NO_POLICY_TOKENS, step, skip_non_finite=True)
        clock.lap()
        metrics["loss/perplexity"] = perplexity(metrics["loss/mean"])
        metrics |= progress(self._feed, engine.world) | disk(self._checkpoints)
        metrics["time/wait_for_batch"] = waited
        clock.lap()
        if told := self.validate(step):
            metrics |= told | {"time/validate": clock.lap()}
        if self.publish(step):
            metrics["time/broadcast_weights"] = clock.lap()
        if checkpoints.is_due(self._config.ckpt, step, self._config.max_steps):
            self._save(step)
            metrics["time/save_ckpt"] = clock.lap()
        metrics |= self._speed.step(rows, clock.total())
        metrics["time/step"] = clock.total()
        if engine.world.rank == 0:
            log.info(log_line(step, metrics, engine.world))
        return metrics

    def validate(self, step: int) -> dict[str, float]:
        """`val/*` if validation is due after `step`, else nothing. Collective."""
        if self._validation is None or not self._validation.is_due(step):
            return {}
        told = self._validation.run()
        if self._engine.world.rank == 0:
            log.info("step %d: validation loss %.4f", step, told["val/loss"])
        return told

    def stop_on_request(self, step: int) -> bool:
        """Whether to end after `step` because the launcher asked for it; the checkpoint is then complete."""
        directory = step_dir(self._checkpoints, step)
        return checkpoints.save_on_request(
            self._run, self._engine.world, directory, ("trainer",), lambda: self._save(step)
        )

    def publish(self, version: int) -> bool:
        """Publish v`version` if an evaluation is due at it; whether that was so. Collective."""
        if self._publisher is None or not publishes(self._config, version):
            return False
        publish(self._engine, self._publisher, version)
        return True

    def _make_publisher(self, run: RunDir) -> Publisher | None:
        if not self._config.eval.env:
            return None
        return make_publisher(run.broadcasts, self._config.sync, self._engine.world.rank, self._engine.device)

    def close(self) -> None:
        self._feed.close()

    def _save(self, step: int) -> None:
        world = self._engine.world
        states = all_gather_json(self._feed.state(), world)[:: world.sequence]
        checkpoints.save(
            self._engine,
            self._config.ckpt,
            self._checkpoints,
            step,
            parts=("trainer",),
            timeout=self._config.trainer.dist_timeout,
            more={"data": states},
        )


def data_states(config: SftConfig) -> list[dict[str, Any]] | None:
    """The place in the data of every rank at the checkpoint to resume from; None to begin from the start."""
    if config.run.resume is None or config.ckpt.skip_progress:
        return None
    extra = read_state(Path(config.run.resume) / "trainer")["extra"]
    if "data" not in extra:
        raise ValueError(
            f"{config.run.resume}: the checkpoint is not of `prl sft` and has no place in the data. "
            "Start a new run with model.path=<the run>, or set ckpt.skip_progress=true to begin with the data"
        )
    return extra["data"]
