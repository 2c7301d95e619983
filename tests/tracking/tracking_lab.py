"""What tests of tracking are made of: a config, facts about a run, episodes as they are written."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from prl.config.algo import GrpoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, MlflowConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.run_dir import RunDir
from prl.tracking.facts import Facts


def make_facts(path: Path, attempt: int = 1, sweep: Path | None = None, **fields: Any) -> Facts:
    """What the tracker is told about attempt `attempt` of the run at `path`; `fields` go to the config."""
    run = RunDir(path, attempt)
    run.metrics.mkdir(parents=True, exist_ok=True)
    rest = {"optim": AdamWConfig(lr=1e-4), "algo": GrpoConfig(), "tracking": MlflowConfig(), **fields}
    config = RlConfig(
        loss=IpoConfig(),
        model=ModelConfig(name="tiny"),
        env={"reverse_text": EnvConfig()},
        scheduler=SchedulerConfig(),
        inference=EmbeddedConfig(),
        **rest,
    )
    return Facts(run, "rl", config, ["optim.lr=1e-4"], sweep)


def append_line(run: RunDir, step: int | None, producer: str = "trainer", **values: float) -> None:
    """One line of a stream of `run`."""
    line = {"producer": producer, "step": step, "time": time.time(), **values}
    run.metrics.mkdir(parents=True, exist_ok=True)
    with run.metric_file(producer).open("a") as file:
        file.write(json.dumps(line) + "\n")


def node(parent: int | None, role: str, content: str) -> dict[str, Any]:
    return {"parent": parent, "role": role, "content": content, "sampled": role == "assistant"}


def episode(name: str, step: int, reward: float | None = 0.5, **trace: Any) -> dict[str, Any]:
    """An episode with one tool call, as a line of the stream."""
    nodes = [
        node(None, "user", f"question {name}"),
        node(0, "assistant", "call the tool"),
        node(1, "tool", "42"),
        node(2, "assistant", f"answer {name}"),
    ]
    told = {"id": f"{name}-t", "agent": "agent", "reward": reward, "rewards": {"exact": reward}}
    told |= {"metrics": {}, "error": None, "is_truncated": False, "stop_condition": "done", "nodes": nodes}
    return {
        "id": name,
        "env": "toy",
        "group": f"g{step}",
        "step": step,
        "attempt": 1,
        "task_key": "7",
        "policy": [step - 1, step],
        "task": {"prompt": f"question {name}"},
        "started_at": 1000.0 + step,
        "finished_at": 1002.0 + step,
        "traces": [{**told, **trace}],
    }


def append_episodes(traces: Path, *episodes: dict[str, Any]) -> None:
    """Add episodes to the stream and its index."""
    traces.mkdir(parents=True, exist_ok=True)
    with (traces / "stream.jsonl").open("ab") as stream, (traces / "index.jsonl").open("ab") as index:
        for record in episodes:
            line = json.dumps(record).encode()
            row = {"id": record["id"], "env": record["env"], "step": record["step"]}
            row |= {"offset": stream.tell(), "length": len(line)}
            stream.write(line + b"\n")
            index.write(json.dumps(row).encode() + b"\n")
