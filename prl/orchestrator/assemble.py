"""From a config and connections to the parts of the main loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.algo.samples import BuiltSamples, build_samples
from prl.checkpoint import stop
from prl.checkpoint.marker import read_step, step_dir, unmark
from prl.checkpoint.resolve import checkpoints_dir
from prl.config.schema import RlConfig
from prl.env.source import EnvServerDied
from prl.model_path import resolve_model_path
from prl.orchestrator import state
from prl.orchestrator.concurrency import AdaptiveLimit
from prl.orchestrator.connect import Connected
from prl.orchestrator.cost import cost_of_model
from prl.orchestrator.dispatcher import Dispatcher
from prl.orchestrator.engine_load import LoadPoll
from prl.orchestrator.episodes import Outcome
from prl.orchestrator.eval_epoch import Evals
from prl.orchestrator.eval_flights import EvalFlights
from prl.orchestrator.loop import Outbox, Parts
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.packing import pack_batch
from prl.orchestrator.pipeline import Pipeline
from prl.orchestrator.sink import Sink
from prl.orchestrator.traces import TraceLog
from prl.orchestrator.watcher import Watcher
from prl.orchestrator.wire import encode_shipment
from prl.records import Trace, TrainSample
from prl.run_dir import RunDir
from prl.sync.versions import awaited_fingerprint, next_version
from prl.tracking.stream import MetricStream


def assemble(
    config: RlConfig, run: RunDir, connected: Connected, outbox: Outbox, resumed: Path | None
) -> Parts:
    """The parts of a run that goes on after checkpoint `resumed`, or starts. Reads the saved state.

    Raises ValueError when that is damaged, or of other environments.
    """
    done = read_step(resumed) if resumed else 0
    line = Pipeline(done + 1, done)
    traces = TraceLog(run.traces, run.attempt)
    metrics = MetricStream(run.metric_file("orchestrator"), "orchestrator")
    mixer = TaskMixer(connected.curricula, {name: env.ratio for name, env in config.env.items()}, config.seed)
    evals = Evals(
        connected.evals,
        last=config.max_steps,
        pinned=config.eval.pin_version,
        report=metrics.log,
        record=lambda episode, version: traces.add(episode, version, kind="eval"),
    )
    totals = state.Totals()
    if resumed:
        saved = state.load(state.state_path(resumed), done)
        totals = state.restore(saved, mixer, connected.algorithms, evals, config.ckpt.skip_progress)
    sink = _sink(config, connected, mixer, line, traces)
    inbox: asyncio.Queue[Outcome] = asyncio.Queue()
    limit = _limit(config, lambda: dispatcher)
    dispatcher = Dispatcher(
        connected.sources,
        mixer,
        line,
        limit=limit,
        bound=config.rollout.max_off_policy_steps,
        batch_size=config.rollout.batch_size,
        inbox=inbox,
        arrive=sink.arrive,
        settling=lambda: sink.settling,
        queued=lambda: sink.queued,
        fatal=(EnvServerDied,),
        attempt=run.attempt,
        tasks_per_minute=config.rollout.tasks_per_minute,
        evals=EvalFlights(evals, line, cap=config.eval.max_inflight, fatal=(EnvServerDied,)),
    )
    watcher = Watcher(
        [connected.engine],
        line,
        newest=lambda: next_version(run.broadcasts, line.version, evals.is_due),
        announce=dispatcher.cancel_stale,
        report=metrics.log,
        proof=lambda published: awaited_fingerprint(published, config.sync.timeout),
        held=lambda: config.eval.pin_version and not evals.idle,
        applied=evals.trigger,
    )
    poll = LoadPoll(connected.engine_roots, limit.look, metrics.log)
    return Parts(
        line, dispatcher, sink, inbox, watcher, outbox, traces, metrics, _packer(config),
        _saver(config, run, mixer, connected, totals, evals), totals, evals,
        services={"engine load": poll.run}, gauges=limit.take_metrics,
    )  # fmt: skip


def _limit(config: RlConfig, dispatcher: Callable[[], Dispatcher]) -> AdaptiveLimit:
    rollout = config.rollout
    return AdaptiveLimit(
        low=rollout.min_inflight,
        high=rollout.max_inflight,
        initial=rollout.initial_inflight,
        fallback=rollout.max_inflight or rollout.batch_size,
        context=config.inference.max_model_len,
        inflight=lambda: dispatcher().all_inflight,
        shed=lambda count: dispatcher().shed(count),
    )


def _sink(config: RlConfig, connected: Connected, mixer: TaskMixer, line: Pipeline, traces: TraceLog) -> Sink:
    rollout = config.rollout
    patience = rollout.max_fruitless_batches
    return Sink(
        connected.algorithms,
        connected.curricula,
        _sample_builder(config, connected),
        mixer,
        line,
        batch_size=rollout.batch_size,
        bound=rollout.max_off_policy_steps,
        constant=rollout.constant_batch_size,
        record=lambda episode: traces.add(episode, line.step),
        max_barren=None if patience is None else patience * rollout.batch_size,
    )


def _sample_builder(config: RlConfig, connected: Connected) -> Callable[[str, Trace], BuiltSamples]:
    def build(env: str, trace: Trace) -> BuiltSamples:
        return build_samples(
            trace,
            env=env,
            action_loss=connected.algorithms[env].action_loss,
            temperature=connected.sources[env].sampling["temperature"],
            seq_len=config.trainer.seq_len,
            min_abs_advantage=config.env[env].min_abs_advantage,
        )

    return build


def _packer(config: RlConfig) -> Callable[[int, Sequence[TrainSample]], list[bytes]]:
    cost = cost_of_model(resolve_model_path(config.model))
    ranks, sharing = config.cluster.train_ranks, config.trainer.sequence_parallel

    def pack(step: int, samples: Sequence[TrainSample]) -> list[bytes]:
        packed = pack_batch(samples, ranks=ranks // sharing, seq_len=config.trainer.seq_len, cost=cost)
        return [encode_shipment(step, rank, packed[rank // sharing]) for rank in range(ranks)]

    return pack


def _saver(
    config: RlConfig,
    run: RunDir,
    mixer: TaskMixer,
    connected: Connected,
    totals: state.Totals,
    evals: Evals,
) -> Callable[[int], Any]:
    """Writes the orchestrator's part of a checkpoint where one is due, before the batch is shipped: the
    trainer completes the checkpoint after its step and finds this part there."""
    checkpoints = checkpoints_dir(config.ckpt, run)

    def write(step: int, snapshot: dict[str, Any]) -> None:
        directory = step_dir(checkpoints, step)
        unmark(directory)
        state.save(state.state_path(directory), snapshot)

    async def save(step: int) -> None:
        if state.saves_at(step, config.ckpt, config.max_steps) or stop.is_requested(run):
            snapshot = state.snapshot(step, totals, mixer, connected.algorithms, evals)
            await asyncio.to_thread(write, step, snapshot)

    return save
