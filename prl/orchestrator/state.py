"""The orchestrator's part of a checkpoint: one JSON file, replaced whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prl.config.training import CkptConfig
from prl.orchestrator.mixing import TaskMixer
from prl.orchestrator.window import Window
from prl.run_dir import write_atomic

FORMAT = 2


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass
class Totals:
    """What arrived since the run began, over all attempts, up to the last shipped batch."""

    tokens: int = 0
    rollouts: int = 0
    tasks: int = 0

    def add(self, window: Window) -> None:
        self.tokens += window.num_tokens
        self.rollouts += window.num_episodes
        self.tasks += window.num_tasks

    def metrics(self) -> dict[str, float]:
        return {f"progress/total_{name}": value for name, value in asdict(self).items()}


def state_path(step_dir: Path) -> Path:
    """Where the orchestrator's part of a checkpoint (`.../step_N`) lies."""
    return step_dir / "orchestrator" / "state.json"


def saves_at(step: int, ckpt: CkptConfig, max_steps: int | None) -> bool:
    """Whether a checkpoint is made after `step`."""
    at_interval = ckpt.interval is not None and step % ckpt.interval == 0
    return at_interval or (ckpt.at_end and step == max_steps)


def snapshot(
    step: int, totals: Totals, mixer: TaskMixer, algorithms: Mapping[str, Stateful], evals: Stateful
) -> dict[str, Any]:
    """JSON of all that a resumed run needs to go on after batch `step`.

    Rollouts are not kept. Their tasks are: those that no shipped batch used up are drawn again.
    """
    return {
        "format": FORMAT,
        "step": step,
        "totals": asdict(totals),
        "tasks": mixer.state_dict(),
        "algorithms": {env: algorithm.state_dict() for env, algorithm in algorithms.items()},
        "evals": evals.state_dict(),
    }


def save(path: Path, state: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(state))


def load(path: Path, step: int) -> dict[str, Any]:
    """The state saved after batch `step`.

    Raises FileNotFoundError when there is none, ValueError when the file is torn, of another format or of
    another step; a damaged state is never used in part.
    """
    try:
        state = json.loads(path.read_text())
        found = (state["format"], state["step"])
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); resume from another checkpoint") from error
    if found != (FORMAT, step):
        raise ValueError(
            f"{path} is of format {found[0]} and step {found[1]}, not format {FORMAT}, step {step}"
        )
    return state


def restore(
    state: Mapping[str, Any],
    mixer: TaskMixer,
    algorithms: Mapping[str, Stateful],
    evals: Stateful,
    skip_progress: bool = False,
) -> Totals:
    """Put a loaded state back. With `skip_progress`, tasks, totals and evaluations start anew; algorithms do
    not.

    Raises ValueError when the tasks are of other environments than this run has.
    """
    for env in algorithms.keys() & state["algorithms"].keys():
        algorithms[env].load_state_dict(state["algorithms"][env])
    if skip_progress:
        return Totals()
    mixer.load_state_dict(state["tasks"])
    evals.load_state_dict(state["evals"])
    return Totals(**state["totals"])
