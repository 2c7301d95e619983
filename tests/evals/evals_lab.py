"""Short ways to configs, episodes, ledgers and runs of evaluations, without any process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.config.schema import EvalConfig, EvalRulesConfig
from prl.config.serving import ExternalConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import ModelConfig
from prl.evals.ledger import Ledger
from prl.evals.plan import Plan
from prl.evals.sources import Key
from prl.records import Episode, Node, Trace, TraceError
from prl.run_dir import RunDir

ROOT = Path(__file__).parents[2]


def role_environment() -> dict[str, str]:
    """Environment of a role's process that this checkout's code runs in."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def make_config(**fields: Any) -> EvalConfig:
    rules = fields.pop("rules", {})
    defaults: dict[str, Any] = {
        "env": {"toy": EnvConfig()},
        "model": ModelConfig(name="chat"),
        "inference": ExternalConfig(base_url="http://127.0.0.1:9/v1"),
        "tracking": TrackingConfig(),
        "eval": EvalRulesConfig(**{"backoff": 0.001, "resamples": 200, **rules}),
    }
    return EvalConfig(**(defaults | fields))


def make_run(path: Path, attempt: int = 1) -> RunDir:
    run = RunDir(path, attempt)
    run.configs.mkdir(parents=True, exist_ok=True)
    return run


def make_episode(
    key: Key,
    reward: float | dict[str, float] = 1.0,
    error: TraceError | None = None,
    number: list[int] = [0],  # noqa: B006 (a counter)
) -> Episode:
    number[0] += 1
    rewards = reward if isinstance(reward, dict) else {"agent": reward}
    nodes = [
        Node(None, "user", False, [], [], [], content="ask"),
        Node(0, "assistant", True, [], [], [], content="say"),
    ]
    traces = [
        Trace(
            f"t{number[0]}-{agent}",
            agent,
            nodes,
            [[0, 1]],
            None if error else value,
            metrics={"exact": value},
            error=error,
            num_turns=1,
        )
        for agent, value in rewards.items()
    ]
    now = time.time()
    group = f"{key.env}:{key.task}"
    return Episode(f"e{number[0]}", key.env, group, key.task, {"prompt": "ask"}, traces, None, now, now)


def fill(run: RunDir, entries: Iterable[tuple[Key, Any]], envs: dict[str, int] | None = None) -> None:
    """Write a plan and a ledger; a reward of None is a failed rollout."""
    entries = list(entries)
    ledger = Ledger(run)

    async def write() -> None:
        for key, reward in entries:
            error = TraceError("ProviderError", "broken", 500) if reward is None else None
            await ledger.append(key, make_episode(key, 0.0 if reward is None else reward, error), 0)

    asyncio.run(write())
    ledger.close()
    keys = [key for key, _ in entries]
    sizes = envs or {key.env: 1 + max(k.rollout for k in keys if k.env == key.env) for key in keys}
    tasks = {env: sorted({key.task for key in keys if key.env == env}) for env in sizes}
    Plan(sizes, tasks, sorted({key.step for key in keys})).write(run)


@dataclass(frozen=True)
class ToyTask:
    key: str


@dataclass
class ToyEnv:
    """An environment in this process: `script(task key, calls so far)` gives a reward or an error."""

    script: Callable[[str, int], float | TraceError]
    latency: float = 0.0
    calls: list[str] = field(default_factory=list)
    salts: set[str | None] = field(default_factory=set)
    running: int = 0
    most_running: int = 0

    async def run(self, task: ToyTask, **request: Any) -> Episode:
        assert request["train"] is False
        self.salts.add(request["cache_salt"])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(self.latency)
            outcome = self.script(task.key, self.calls.count(task.key))
            self.calls.append(task.key)
        finally:
            self.running -= 1
        key = Key(0, "toy", task.key, 0)
        if isinstance(outcome, TraceError):
            return make_episode(key, 0.0, outcome)
        return make_episode(key, outcome)
