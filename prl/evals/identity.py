"""What must stay the same for two attempts to be one evaluation."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from prl.config.load import load_resolved
from prl.config.schema import EvalConfig
from prl.evals.checkpoints import weight_files
from prl.run_dir import RunDir, write_atomic
from prl.tracking.params import flatten

WEIGHTS = "weights.json"
FREE = re.compile(
    r"(run|client|log|tracking|monitor|cluster|eval|select|shared)\..*|concurrency|output_dir|dry_run|steps"
    r"|rollout\.(group_size|sampling\..*)|inference\.(?!max_model_len).*"
    r"|env\.[^.]+\.(select\..*|group_size|workers|seats|ratio|algo|curriculum|min_abs_advantage)"
)
"""Keys that may differ: who asks, where it goes, how many tasks and rollouts. Shared values count where
they arrive, in each environment."""


def changes(before: EvalConfig, now: EvalConfig) -> list[str]:
    """`key: old -> new` of everything that makes the two different measurements."""
    first, second = flatten(before), flatten(now)
    keys = sorted(key for key in first.keys() | second.keys() if not FREE.fullmatch(key))
    found = [key for key in keys if first.get(key) != second.get(key)]
    engines = before.inference.name, now.inference.name
    if engines[0] != engines[1] and "external" in engines:  # nobody can tell what a stranger serves
        found.append("inference.name")
    return [f"{key}: {first.get(key, 'absent')} -> {second.get(key, 'absent')}" for key in found]


def check_same(config: EvalConfig, run: Path) -> None:
    """Raises ValueError if what `config` measures differs from what the newest attempt in `run` did."""
    configs = sorted(run.glob("configs/attempt_*/resolved.yaml"), key=_attempt)
    if not configs:
        return
    command, before = load_resolved(configs[-1])
    if command != "eval":
        raise ValueError(f"run.name = {run.name}: {run} is a run of `prl {command}`, not an evaluation")
    found = changes(before, config)
    stored = configs[-1].with_name(WEIGHTS)
    known: dict[str, Any] = json.loads(stored.read_text()) if stored.exists() else {}
    files = weight_files(config)
    found += [
        f"weights: {name} was written anew" for name in known if name in files and files[name] != known[name]
    ]
    if found:
        text = "\n  ".join(found)
        raise ValueError(
            f"run.resume = latest: {run.name} measured something else; its rollouts cannot be mixed with new "
            f"ones:\n  {text}\nChoose another run.name, or undo the change."
        )


def note_weights(config: EvalConfig, run: RunDir) -> None:
    """Keep what `check_same` compares with."""
    write_atomic(run.configs / WEIGHTS, json.dumps(weight_files(config)))


def _attempt(resolved: Path) -> int:
    return int(resolved.parent.name.removeprefix("attempt_"))
