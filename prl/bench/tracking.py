"""`prl bench tracking`: what tracking costs a training step, side by side without and with it.

The trainer's part is one line of JSON a step. MLflow is written by another process, as the launcher does it,
at a lower priority; it shares the machine, so the steps are timed with and without it running.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from prl.config.compose import compose_job
from prl.run_dir import RunDir
from prl.tracking.stream import MetricStream

START_SECONDS = 600.0
PAIR = 2
"""Steps without tracking, then as many with it."""
EXTRA_METRICS = 40
"""Values a step beside those of this step: a run of several environments has more."""


class Timing(NamedTuple):
    """Seconds of one step: wall time, CPU time of the process, wall time of the log call."""

    wall: float
    cpu: float
    log: float


def main(words: Sequence[str]) -> int:
    """The tool; 0."""
    parser = argparse.ArgumentParser(prog="prl bench tracking", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps without tracking, and as many with it")
    parser.add_argument("--rows", type=int, default=8, help="packed rows of 512 tokens in a step")
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    options = parser.parse_args(list(words))
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), max(2 * PAIR, options.steps), max(1, options.rows))
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def measure(scratch: Path, steps: int, rows: int) -> dict[str, Any]:
    """Pairs of steps without and with tracking, in turn; without it the writer stands still."""
    step = Step(scratch, rows)
    step.run(2)  # warms up
    run = RunDir(scratch / "outputs" / "bench")
    without: list[Timing] = []
    tracked: list[Timing] = []
    with writing(run, step.metrics) as writer:
        stream = MetricStream(run.metric_file("trainer"), "trainer")
        began = cpu_seconds(writer)
        for _ in range(0, steps, PAIR):
            writer.suspend()
            without += step.run(PAIR)
            writer.resume()
            tracked += step.run(PAIR, stream)
        stream.close()
        used = cpu_seconds(writer) - began
    step.close()
    return summary(without, tracked, len(step.metrics), used / len(tracked))


class Step:
    """A real optimizer step of the bundled model on made-up rows, again and again."""

    def __init__(self, scratch: Path, rows: int) -> None:
        from prl.bench.fake_rows import fake_row
        from prl.trainer import distributed
        from prl.trainer.engine import TrainEngine

        self.config = compose_job("rl", [f"output_dir={scratch / 'outputs'}", "trainer.seq_len=512"])
        self.world = distributed.join(0, 1, scratch / "store", self.config.trainer.dist_timeout)
        self.engine = TrainEngine(self.config, self.world, None)
        vocabulary = self.engine.model.config.get_text_config().vocab_size
        self.rows = [fake_row(512, 16, vocabulary, seed) for seed in range(rows)]
        self.metrics: dict[str, float] = {f"extra/metric_{n}/mean": 0.1 * n for n in range(EXTRA_METRICS)}
        self.done = 0

    def run(self, steps: int, stream: MetricStream | None = None) -> list[Timing]:
        """So many steps; each is logged if there is a stream."""
        from prl.trainer.step import train_step

        found = []
        for _ in range(steps):
            self.done += 1
            wall, cpu = time.perf_counter(), time.process_time()
            self.metrics |= train_step(self.engine, self.rows, self.config.loss, self.done)
            trained = time.perf_counter()
            if stream:
                stream.log(self.metrics, self.done)
            ended = time.perf_counter()
            found.append(Timing(ended - wall, time.process_time() - cpu, ended - trained))
        return found

    def close(self) -> None:
        from prl.trainer import distributed

        self.engine.close()
        distributed.leave(self.world)


@contextlib.contextmanager
def writing(run: RunDir, first: dict[str, float]) -> Iterator[psutil.Process]:
    """A process that mirrors the streams of `run` to a fresh sqlite store; ready when the block begins."""
    stream = MetricStream(run.metric_file("trainer"), "trainer")
    stream.log(first, 0)  # a writer connects when there is something to write
    stream.close()
    command = [sys.executable, "-m", "prl.bench.tracking_writer", str(run.path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (run.path / "mlflow_cursor.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the MLflow writer did not start")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        process.communicate(timeout=START_SECONDS)  # closing its input ends it


def cpu_seconds(process: psutil.Process) -> float:
    """CPU time that a process has used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def summary(
    without: Sequence[Timing], tracked: Sequence[Timing], metrics: int, writer: float
) -> dict[str, Any]:
    """The numbers, from medians. Shares are of a step without tracking; `noise` is how much the CPU time of
    the first and the second half of those steps differs."""
    plain, logged, half = medians(without), medians(tracked), len(without) // 2
    first, second = medians(without[:half]), medians(without[half:])
    return {
        "metrics_per_step": metrics,
        "without": plain._asdict(),
        "with": logged._asdict(),
        "noise": abs(first.cpu - second.cpu) / plain.cpu,
        "log_share": logged.log / plain.wall,
        "cpu_overhead": logged.cpu / plain.cpu - 1,
        "wall_overhead": logged.wall / plain.wall - 1,
        "writer_cpu_per_step": writer,
    }


def medians(timings: Sequence[Timing]) -> Timing:
    """Column by column."""
    return Timing(*(statistics.median(column) for column in zip(*timings, strict=True)))


def table(result: dict[str, Any]) -> str:
    """The numbers as text."""
    lines = [f"{'seconds a step':24}{'wall':>10}{'CPU':>10}"]
    for name in ("without", "with"):
        lines.append(f"{name + ' tracking':24}{result[name]['wall']:10.4f}{result[name]['cpu']:10.4f}")
    count = result["metrics_per_step"]
    log_ms = 1000 * result["with"]["log"]
    lines += [
        f"overhead: CPU of the trainer {result['cpu_overhead']:+.2%}, wall {result['wall_overhead']:+.2%}; "
        f"steps without tracking differ among themselves by {result['noise']:.2%}",
        f"the log call: {count} metrics in {log_ms:.2f} ms, {result['log_share']:.3%} of a step",
        f"the MLflow writer, another process: {1000 * result['writer_cpu_per_step']:.1f} ms CPU a step",
    ]
    return "\n".join(lines)
