"""Generates run directories of any size in the formats that prl writes, without running anything."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START = 1_796_000_000.0
SECONDS_A_STEP = 4.0
TEMPLATES = 512
ERRORS = ("TimeoutError", "ToolError", "EngineError")


@dataclass(frozen=True)
class Shape:
    """How large a generated run is, and what is in it. One group of `group_size` has one task."""

    episodes: int = 64
    batch_size: int = 32
    group_size: int = 8
    envs: tuple[str, ...] = ("reverse_text", "arithmetic")
    error_rate: float = 0.04
    truncated_rate: float = 0.1
    lr: float = 3e-4
    loss: str = "ipo"
    seed: int = 0
    speed: float = 1.0
    ended: str | None = "FINISHED"

    @property
    def steps(self) -> int:
        return -(-self.episodes // self.batch_size)


def write_run(path: Path, shape: Shape = Shape(), index: bool = True) -> Path:
    """A whole run of `shape` at `path`; without `index` the trace index is left out."""
    rng = random.Random(shape.seed)
    write_configs(path, shape)
    write_metrics(path, shape, rng)
    write_traces(path, shape, rng, index)
    write_logs(path)
    status = f"# {path.name}\n\n## 2026-11-30 10:00:00 UTC: attempt 1 started\n\n- starts from `scratch`\n"
    if shape.ended:
        status += f"\n## 2026-11-30 11:00:00 UTC: attempt 1 ended: {shape.ended}\n\n- step {shape.steps}\n"
    (path / "STATUS.md").write_text(status)
    return path


def write_configs(path: Path, shape: Shape, attempt: int = 1) -> None:
    config = {
        "command": "rl",
        "algo": {"name": "grpo"},
        "loss": {"name": shape.loss, "eps": 0.3},
        "model": {"name": "tiny", "path": None},
        "env": {name: {"ratio": 1.0} for name in shape.envs},
        "optim": {"name": "adamw", "lr": shape.lr},
        "client": {"headers": {"Authorization": "Bearer hush"}},
        "max_steps": shape.steps,
        "seed": shape.seed,
    }
    directory = path / "configs" / f"attempt_{attempt}"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "resolved.yaml").write_text(json.dumps(config))
    (directory / "command.txt").write_text(
        f"python -m prl optim.lr={shape.lr} client.headers.Authorization=hush\n"
        "# 2026-11-30 23:59:50 UTC, host, in /home\n"
    )


def write_metrics(path: Path, shape: Shape, rng: random.Random, first: int = 1) -> None:
    """Two streams with the curves of every curated chart."""
    orchestrator, trainer = [], []
    for step in range(first, shape.steps + 1):
        at = START + step * SECONDS_A_STEP
        orchestrator.append(orchestrator_line(step, at, shape, rng))
        trainer.append(trainer_line(step, at + 1.0, rng))
        orchestrator.append(
            {"producer": "orchestrator", "step": None, "time": at, "dispatcher/inflight/train": step % 7}
        )
    write_lines(path / "metrics" / "orchestrator.jsonl", orchestrator)
    write_lines(path / "metrics" / "trainer.jsonl", trainer)


def reward_at(step: int, shape: Shape) -> float:
    return 0.9 - 0.7 * math.exp(-shape.speed * 3.0 * step / shape.steps)


def orchestrator_line(step: int, at: float, shape: Shape, rng: random.Random) -> dict[str, Any]:
    mean = reward_at(step, shape) + rng.gauss(0, 0.02)
    agent = "train/agg/effective/agent"
    values = {
        f"{agent}/reward/mean": mean,
        f"{agent}/reward/max": 1.0,
        f"{agent}/is_truncated/mean": shape.truncated_rate * rng.random(),
        f"{agent}/num_output_tokens/mean": 10 + 2 * mean,
        f"{agent}/num_output_tokens/p90": 13.0,
        "train/agg/all/has_error/mean": shape.error_rate * rng.random(),
        "train/agg/all/cancelled/mean": 0.0,
        "train/agg/all/agent/solved_none": 0.3 * (1 - mean),
        "train/agg/all/agent/solved_some": 0.7,
        "train/agg/all/agent/solved_all": 0.3 * mean,
        "off_policy/mean": 0.8,
        "off_policy/max": 1.0,
        "time/step": SECONDS_A_STEP,
        "time/wait_for_policy": 0.3 * rng.random(),
        "time/pack": 0.02,
    }
    return {"producer": "orchestrator", "step": step, "time": at, **values}


def trainer_line(step: int, at: float, rng: random.Random) -> dict[str, Any]:
    values = {
        "loss/mean": -0.04 * rng.random(),
        "entropy/all/mean": 0.6 * math.exp(-step / 500) + 0.02 * rng.random(),
        "mismatch_kl/all/mean": 5e-4 * math.exp(rng.gauss(0, 0.4)),
        "mismatch_kl/all/max": 0.1 * math.exp(rng.gauss(0, 0.4)),
        "is_masked/mean": 0.01 * rng.random(),
        "optim/lr": 3e-4,
        "optim/grad_norm": 0.5 + 0.3 * rng.random(),
        "perf/throughput": 3800 + 200 * rng.random(),
        "perf/peak_memory": 0.44,
        "time/load_data": 0.01,
        "time/forward_backward": 1.0,
        "time/broadcast_weights": 0.1,
        "time/wait_for_batch": SECONDS_A_STEP - 1.2,
        "time/step": SECONDS_A_STEP,
    }
    return {"producer": "trainer", "step": step, "time": at, **values}


def write_traces(path: Path, shape: Shape, rng: random.Random, index: bool = True) -> None:
    """The four trace files. Groups near each other repeat their contents, with other ids, steps and times."""
    traces = path / "traces"
    traces.mkdir(parents=True, exist_ok=True)
    templates = [Template(episode(number, shape, rng)) for number in _spread(shape)]
    lines: dict[str, list[str]] = {name: [] for name in ("stream", "index", "annotations", "trainer_0")}
    offset = 0
    for number in range(shape.episodes):
        template = templates[_template_of(number, len(templates), shape)]
        line = template.episode(number, shape)
        lines["stream"].append(line)
        lines["index"].append(template.index(number, shape, offset, len(line)))
        offset += len(line) + 1
        if not template.failed:
            lines["annotations"].append(template.annotation(number, shape))
            lines["trainer_0"].append(template.trainer(number, shape))
    for name, text in lines.items():
        if index or name != "index":
            (traces / f"{name}.jsonl").write_text("".join(line + "\n" for line in text))


def _spread(shape: Shape) -> list[int]:
    """Numbers of the episodes that are made in full: whole groups, evenly over the run."""
    groups = -(-shape.episodes // shape.group_size)
    kept = min(groups, TEMPLATES // shape.group_size)
    size = shape.group_size
    return [(i * groups // kept) * size + member for i in range(kept) for member in range(size)]


def _template_of(number: int, templates: int, shape: Shape) -> int:
    groups = -(-shape.episodes // shape.group_size)
    kept = templates // shape.group_size
    return number // shape.group_size * kept // groups * shape.group_size + number % shape.group_size


class Template:
    """The lines of one episode with places for what differs: number, group, step, moment.

    Encoding 10^5 episodes one by one takes a minute; filling in four numbers does not.
    """

    def __init__(self, record: dict[str, Any]) -> None:
        trace = record["traces"][0]
        self.failed = trace["error"] is not None
        self._seconds = record["finished_at"] - record["started_at"]
        trace["id"], record["id"], record["group"], record["task_key"] = "t@N", "e@N", "g@G", "task-@G"
        record["step"], record["policy"] = "@S", ["@P", "@Q"]
        record["started_at"], record["finished_at"] = "@B", "@E"
        place = {"finished_at": "@E", "seconds": self._seconds, "offset": "@O", "length": "@L"}
        self._episode = _format(record)
        self._index = _format(index_line({**record, "started_at": 0.0, "finished_at": 0.0}, 0, 0) | place)
        if not self.failed:
            self._annotation = _format(annotation(record))
            self._trainer = _format(trainer_sample(record))

    def episode(self, number: int, shape: Shape) -> str:
        return self._episode.format(**self._values(number, shape))

    def index(self, number: int, shape: Shape, offset: int, length: int) -> str:
        return self._index.format(**self._values(number, shape), O=offset, L=length)

    def annotation(self, number: int, shape: Shape) -> str:
        return self._annotation.format(**self._values(number, shape))

    def trainer(self, number: int, shape: Shape) -> str:
        return self._trainer.format(**self._values(number, shape))

    def _values(self, number: int, shape: Shape) -> dict[str, Any]:
        step = number // shape.batch_size + 1
        end = START + step * SECONDS_A_STEP + (number % shape.batch_size) * 0.01
        return {
            "N": number,
            "G": number // shape.group_size,
            "S": step,
            "P": max(0, step - 2),
            "Q": step - 1,
            "B": end - self._seconds,
            "E": end,
        }


def _format(record: dict[str, Any]) -> str:
    """JSON text in which `@X` is a field of `str.format`; a value that is nothing else is a number."""
    text = json.dumps(record).replace("{", "{{").replace("}", "}}")
    return re.sub(r"@([A-Z])", r"{\1}", re.sub(r'"@([A-Z])"', r"{\1}", text))


def episode(number: int, shape: Shape, rng: random.Random) -> dict[str, Any]:
    """A question and an answer in the bundled model's alphabet: a character c is token ord(c) - 25."""
    step = number // shape.batch_size + 1
    group = number // shape.group_size
    failed = rng.random() < shape.error_rate
    truncated = not failed and rng.random() < shape.truncated_rate
    word = "".join(random.Random(group).sample("abcdefghij", 5))
    reward = None if failed else round(min(1.0, max(0.0, reward_at(step, shape) + rng.gauss(0, 0.2))), 3)
    answer = f"[{word[::-1]}]" if (reward or 0) > 0.3 else word[::-1]
    finished = START + step * SECONDS_A_STEP + (number % shape.batch_size) * 0.01
    nodes = [node(None, "user", f"reverse {word}", False), node(0, "assistant", answer, True)]
    trace = {
        "id": f"t{number}",
        "agent": "agent",
        "reward": reward,
        "rewards": {"exact": reward},
        "metrics": {"formatted": 1.0},
        "error": {"type": rng.choice(ERRORS), "message": "it took <b>too</b> long"} if failed else None,
        "is_truncated": truncated,
        "is_completed": not failed,
        "stop_condition": None if failed else "agent_completed",
        "num_turns": 1,
        "timing": {"total": 0.5},
        "info": {},
        "branches": [[0, 1]],
        "nodes": nodes,
    }
    return {
        "id": f"e{number}",
        "env": shape.envs[group % len(shape.envs)],
        "group": f"g{group}",
        "step": step,
        "attempt": 1,
        "task_key": f"task-{group:06d}",
        "policy": [max(0, step - 2), step - 1],
        "task": {"prompt": f"reverse {word}", "answer": answer},
        "started_at": finished - 0.5 - rng.random(),
        "finished_at": finished,
        "traces": [trace],
    }


def node(parent: int | None, role: str, text: str, sampled: bool) -> dict[str, Any]:
    tokens = [5 if sampled else 4, *(228 if c == " " else ord(c) - 25 for c in text), 7]
    flags = [0, *([1] * (len(tokens) - 1))] if sampled else 0
    return {
        "parent": parent,
        "role": role,
        "sampled": sampled,
        "content": text,
        "token_ids": tokens,
        "mask": flags,
        "logprobs": [round(-0.05 * (i % 9), 3) for i in range(len(tokens) - 1)] if sampled else [],
    }


def index_line(record: dict[str, Any], offset: int, length: int) -> dict[str, Any]:
    traces = record["traces"]
    head = {key: record[key] for key in ("id", "env", "group", "step", "attempt", "task_key", "policy")}
    return {
        **head,
        "agents": [trace["agent"] for trace in traces],
        "rewards": [trace["reward"] for trace in traces],
        "errors": [trace["error"]["type"] for trace in traces if trace["error"]],
        "truncated": any(trace["is_truncated"] for trace in traces),
        "turns": sum(trace["num_turns"] for trace in traces),
        "tokens": sum(len(item["token_ids"]) for trace in traces for item in trace["nodes"]),
        "seconds": record["finished_at"] - record["started_at"],
        "finished_at": record["finished_at"],
        "offset": offset,
        "length": length,
    }


def annotation(record: dict[str, Any]) -> dict[str, Any]:
    trace = record["traces"][0]
    credit = round(trace["reward"] - 0.5, 3)
    return {
        "episode": record["id"],
        "trace": trace["id"],
        "step": record["step"],
        "attempt": 1,
        "advantage": credit,
        "advantages": [None, credit],
    }


def trainer_sample(record: dict[str, Any]) -> dict[str, Any]:
    """The trainer finds every sampled token a tenth less likely, the last one half a nat more."""
    trace = record["traces"][0]
    sampled = trace["nodes"][1]["logprobs"]
    return {
        "trace": trace["id"],
        "step": record["step"],
        "attempt": 1,
        "tokens": sum(len(item["token_ids"]) for item in trace["nodes"]),
        "logprobs": [*(value - 0.1 for value in sampled[:-1]), sampled[-1] + 0.5],
    }


def write_logs(path: Path) -> None:
    """Three processes around midnight, one with a traceback."""
    logs = path / "logs" / "attempt_1"
    (logs / "trainer").mkdir(parents=True, exist_ok=True)
    (logs / "orchestrator.log").write_text(
        "23:59:58 INFO prl.orchestrator collecting batch 1\n"
        "00:00:01 WARNING prl.orchestrator few rollouts carry credit\n"
    )
    (logs / "trainer" / "0.log").write_text(
        "23:59:59 INFO prl.trainer step 1 | loss -0.04\n00:00:02 ERROR prl.trainer it broke\n"
        "Traceback (most recent call last):\n  ValueError: no <script>alert(1)</script>\n"
    )
    (logs / "inference.log").write_text("00:00:00 INFO prl.inference serving tiny\n")


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
