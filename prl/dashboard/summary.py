"""A run in one row of the list: what it is, how far it is, whether it still lives."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import yaml

from prl.dashboard.catalog import Run
from prl.tracking.secrets import redact

QUIET_SECONDS = 120.0
TAIL_BYTES = 1 << 16
_ENDED = re.compile(r"^## .*: attempt (\d+) ended: (\w+)", re.MULTILINE)
_STARTED = re.compile(r"^## .*: attempt (\d+) started", re.MULTILINE)
_REWARD = re.compile(r"train/agg/effective/(?!num_)[^/]+/reward/mean")
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml where it is built in: a list of runs parses one config each."""


class Summaries:
    """Rows of the list; a config is parsed once, the tails of the streams are read when they grew."""

    def __init__(self) -> None:
        self._configs: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}
        self._progress: dict[Path, tuple[tuple[int, int], dict[str, Any]]] = {}

    def row(self, run: Run) -> dict[str, Any]:
        """Everything that the list shows of `run`, as JSON can say it."""
        attempts = run.attempts()
        config = self.config(run, attempts[-1]) if attempts else {}
        progress = [self._told(path) for path in run.files("metrics/*.jsonl")]
        steps = [told["step"] for told in progress if told["step"] is not None]
        heard = max((told["time"] for told in progress), default=0.0)
        rewards = [told["reward"] for told in progress if told["reward"] is not None]
        return {
            "id": run.id,
            "name": run.name,
            "group": run.group,
            "root": str(run.root),
            "path": str(run.path),
            "attempts": len(attempts),
            "state": _state(run, attempts, heard),
            "step": max(steps, default=None),
            "max_steps": config.get("max_steps"),
            "reward": rewards[-1] if rewards else None,
            "heard": heard or None,
            **_choices(config),
        }

    def config(self, run: Run, attempt: int) -> dict[str, Any]:
        """The resolved config of one attempt, secrets hidden; empty if there is none that can be read."""
        path = run.inside(run.path / "configs" / f"attempt_{attempt}" / "resolved.yaml")
        if path is None:
            return {}
        stamp = _stamp(path)
        if self._configs.get(path, (None,))[0] != stamp:
            self._configs[path] = (stamp, _parsed(path))
        return self._configs[path][1]

    def _told(self, path: Path) -> dict[str, Any]:
        stamp = _stamp(path)
        if self._progress.get(path, (None,))[0] != stamp:
            self._progress[path] = (stamp, _newest(path))
        return self._progress[path][1]


def _parsed(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(), Loader=_Loader)  # a safe loader in either case
    except yaml.YAMLError:
        return {}
    return redact(tree) if isinstance(tree, dict) else {}


def _choices(config: dict[str, Any]) -> dict[str, Any]:
    """The options by which runs differ."""
    named = {key: value for key in ("algo", "loss", "model") if (value := _name(config.get(key)))}
    env = config.get("env")
    return {
        "command": config.get("command"),
        "seed": config.get("seed"),
        "env": ",".join(map(str, env)) if isinstance(env, dict) else None,
        "lr": (config.get("optim") or {}).get("lr") if isinstance(config.get("optim"), dict) else None,
        **named,
    }


def _name(table: Any) -> str | None:
    return str(table["name"]) if isinstance(table, dict) and "name" in table else None


def _newest(path: Path) -> dict[str, Any]:
    """Last step, last time and last mean reward in the end of a stream."""
    told: dict[str, Any] = {"step": None, "time": 0.0, "reward": None}
    for line in _tail(path):
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if not isinstance(fields, dict):
            continue
        told["time"] = max(told["time"], float(fields.get("time") or 0.0))
        if isinstance(fields.get("step"), int):
            told["step"] = fields["step"]
        for name, value in fields.items():
            if _REWARD.fullmatch(name):
                told["reward"] = value
    return told


def _tail(path: Path) -> list[bytes]:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        lines = file.read().split(b"\n")
    return lines[1:] if size > TAIL_BYTES else lines


def _state(run: Run, attempts: list[int], heard: float) -> str:
    """`running`, how the newest attempt ended, or `silent`: it neither ended nor told anything lately."""
    text = status_text(run)
    newest = attempts[-1] if attempts else 0
    ended = {int(number): how.lower() for number, how in _ENDED.findall(text)}
    if newest in ended:
        return ended[newest]
    started = newest in {int(number) for number in _STARTED.findall(text)}
    newest_sign = max(heard, _changed(run.path / "STATUS.md"))
    return "running" if (started or heard) and time.time() - newest_sign < QUIET_SECONDS else "silent"


def status_text(run: Run) -> str:
    """STATUS.md of a run; empty if it has none."""
    path = run.inside(run.path / "STATUS.md")
    return path.read_text(errors="replace") if path else ""


def _changed(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _stamp(path: Path) -> tuple[int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns
