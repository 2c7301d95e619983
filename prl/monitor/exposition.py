"""Metrics of one process in the Prometheus text format, read from its own stream when they are asked for.

Nothing is counted while the process works: the newest lines of its stream are parsed for each scrape.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from prl.run_dir import RunDir

TAIL_BYTES = 1 << 18

TRAINER = {
    "trainer_loss": "loss/mean",
    "trainer_throughput_tokens_per_sec": "perf/throughput",
    "trainer_grad_norm": "optim/grad_norm",
    "trainer_peak_memory_gib": "perf/peak_memory",
    "trainer_learning_rate": "optim/lr",
    "trainer_mfu_percent": "perf/mfu",
    "trainer_entropy": "entropy/all/mean",
    "trainer_mismatch_kl": "mismatch_kl/all/mean",
    "trainer_kl_ent_ratio": "kl_ent_ratio/mean",
    "trainer_wait_for_batch_seconds": "time/wait_for_batch",
}
ORCHESTRATOR = {
    "orchestrator_reward": "train/agg/effective/*/reward/mean",
    "orchestrator_truncated_ratio": "train/agg/effective/*/is_truncated/mean",
    "orchestrator_error_ratio": "train/agg/all/has_error/mean",
    "orchestrator_off_policy_max": "off_policy/max",
    "orchestrator_inflight": "dispatcher/inflight/train",
    "orchestrator_policy_version": "watcher/policy_version",
    "orchestrator_wait_for_policy_seconds": "time/wait_for_policy",
    "orchestrator_event_loop_lag_p99_seconds": "event_loop_lag/p99",
}
GAUGES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "trainer/0": ("trainer", TRAINER),
    "orchestrator": ("orchestrator", ORCHESTRATOR),
}
"""Role -> its stream and the metrics that become gauges. `*` stands for the agent."""


@dataclass
class Newest:
    """The newest value of every metric of a stream, the newest step, and when that was told."""

    values: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    step_time: float | None = None
    heard: float | None = None


@dataclass(frozen=True)
class Sample:
    """One value with its name and labels."""

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)


def exposition(run: RunDir, role: str) -> str:
    """What `/metrics` of process `role` answers."""
    samples = list(process_samples(role))
    if role in GAUGES:
        stream, gauges = GAUGES[role]
        samples += gauge_samples(stream, newest(run.metric_file(stream)), gauges)
    return render(samples)


def process_samples(role: str) -> Iterable[Sample]:
    """What every process has, under the names of the Prometheus clients."""
    process, labels = psutil.Process(), {"role": role}
    times = process.cpu_times()
    yield Sample("prl_up", 1, labels)
    yield Sample("process_resident_memory_bytes", process.memory_info().rss, labels)
    yield Sample("process_cpu_seconds_total", times.user + times.system, labels)
    yield Sample("process_start_time_seconds", process.create_time(), labels)


def gauge_samples(stream: str, told: Newest, gauges: Mapping[str, str]) -> Iterable[Sample]:
    """Gauges of a stream; what it has not told yet is absent."""
    if told.step is not None and told.step_time is not None:
        yield Sample(f"{stream}_step", told.step)
        yield Sample(f"{stream}_last_step_timestamp_seconds", told.step_time)
    for gauge, name in gauges.items():
        pattern = re.compile("([^/]+)".join(map(re.escape, name.split("*"))))
        for key, value in told.values.items():
            if match := pattern.fullmatch(key):
                yield Sample(gauge, value, {"agent": match[1]} if match.groups() else {})


def newest(path: Path) -> Newest:
    """What the end of a stream tells."""
    told = Newest()
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return told
    for line in lines[1:] if size > TAIL_BYTES else lines:
        try:
            fields = json.loads(line)
        except ValueError:  # being written, or torn by a crash
            continue
        if isinstance(fields, dict) and "resumed_from" not in fields:
            _take(told, fields)
    return told


def _take(told: Newest, fields: dict[str, object]) -> None:
    at, step = fields.pop("time", None), fields.pop("step", None)
    told.heard = float(at) if isinstance(at, int | float) else told.heard
    if isinstance(step, int):
        told.step, told.step_time = step, told.heard
    told.values |= {name: float(value) for name, value in fields.items() if isinstance(value, int | float)}


def render(samples: Iterable[Sample]) -> str:
    """The text format, version 0.0.4: samples of one name together below their type."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, found in by_name.items():
        lines.append(f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}")
        lines += [f"{name}{_labels(sample.labels)} {sample.value!r}" for sample in found]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
