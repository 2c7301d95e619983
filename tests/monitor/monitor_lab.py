"""Runs made of numbers: a run directory as the processes of a run leave it, without any of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from prl.monitor.observed import Observed, observe

Values = dict[str, float]
ROLLOUTS: Values = {
    "train/agg/effective/agent/reward/mean": 0.5,
    "train/agg/effective/agent/is_truncated/mean": 0.0,
    "train/agg/all/agent/is_trainable/mean": 0.8,
    "train/agg/all/agent/solved_none": 0.1,
    "train/agg/all/agent/solved_all": 0.1,
    "train/agg/all/has_error/mean": 0.0,
    "off_policy/dropped": 0.0,
    "progress/rollouts": 128.0,
    "time/step": 2.0,
    "time/wait_for_policy": 0.2,
}
TRAINING: Values = {
    "optim/lr": 1e-4,
    "loss/mean": 0.01,
    "entropy/all/mean": 0.4,
    "mismatch_kl/all/mean": 1e-4,
    "optim/grad_norm": 0.5,
    "perf/throughput": 1000.0,
    "time/step": 2.0,
    "time/wait_for_batch": 0.3,
}
CONFIG: dict[str, Any] = {
    "command": "rl",
    "max_steps": 100,
    "optim": {"name": "adamw", "lr": 3e-4, "max_norm": 1.0},
    "rollout": {
        "batch_size": 128,
        "group_size": 8,
        "max_off_policy_steps": 8,
        "max_inflight": None,
        "sampling": {"max_tokens": 64},
    },
    "inference": {"max_model_len": 512},
    "cluster": {"train_ranks": 1},
    "ckpt": {"interval": 5},
}
Change = Callable[[int], Values]


def write_run(
    path: Path,
    steps: int = 12,
    rollouts: Change = lambda step: {},
    training: Change = lambda step: {},
    *,
    config: dict[str, Any] | None = None,
    status: str | None = None,
    now: float | None = None,
) -> Path:
    """A healthy run of so many steps, but for what `rollouts` and `training` change; None leaves a value out.

    `status`: how its launcher noted the end, if it did. `now`: time of the last line.
    """
    end = time.time() if now is None else now
    for step in range(1, steps + 1):
        head = {"step": step, "time": end - 2.0 * (steps - step)}
        append(path, "orchestrator", {**head, **ROLLOUTS, **rollouts(step)})
        append(path, "trainer", {**head, **TRAINING, **training(step)})
    attempt = path / "configs" / "attempt_1"
    attempt.mkdir(parents=True, exist_ok=True)
    (attempt / "resolved.yaml").write_text(yaml.safe_dump(merged(CONFIG, config or {})))
    (path / "logs" / "attempt_1").mkdir(parents=True, exist_ok=True)
    note(path, 1, "started")
    if status:
        note(path, 1, f"ended: {status}")
    return path


def append(path: Path, producer: str, line: dict[str, Any]) -> None:
    """One line of a stream."""
    (path / "metrics").mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in line.items() if value is not None or name == "step"}
    with (path / "metrics" / f"{producer}.jsonl").open("a") as file:
        file.write(json.dumps({"producer": producer, **kept}) + "\n")


def note(path: Path, attempt: int, event: str) -> None:
    """An entry of STATUS.md as the launcher writes it."""
    with (path / "STATUS.md").open("a") as file:
        file.write(f"\n## 2026-01-01 10:00:00 UTC: attempt {attempt} {event}\n\n")


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the leaves of `change`."""
    found = dict(base)
    for key, value in change.items():
        inner = isinstance(value, dict) and isinstance(found.get(key), dict)
        found[key] = merged(found[key], value) if inner else value
    return found


def observed(path: Path, *args: Any, **kwargs: Any) -> Observed:
    """`write_run`, then a look at it."""
    return observe(write_run(path, *args, **kwargs))
