"""The role `eval` with real verifiers, a real environment server, and an endpoint that fails as scripted."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from chat_engine import ChatEngine, reverse
from evals_lab import make_config, role_environment

from prl.config.load import dump_resolved
from prl.config.schema import EvalConfig, RunConfig
from prl.config.serving import ExternalConfig
from prl.config.sources import EnvConfig, SamplingConfig, SelectConfig, TaskMatchConfig
from prl.evals.ledger import read_rows, read_stream
from prl.evals.main import evaluate
from prl.evals.progress import Progress, progress_file
from prl.evals.results import collect
from prl.evals.sources import merge_envs
from prl.run_dir import RunDir


def evaluation(chat: ChatEngine, limit: int | None = 4, group_size: int = 2, **fields: Any) -> EvalConfig:
    defaults: dict[str, Any] = {
        "env": {"reverse_text": EnvConfig()},
        "inference": ExternalConfig(base_url=chat.base_url),
        "select": SelectConfig(limit=limit),
        "run": RunConfig(name="e"),
        "concurrency": 8,
    }
    config = make_config(**(defaults | fields))
    config.rollout.group_size = group_size
    merge_envs(config)
    return config


def prepare(tmp_path: Path, config: EvalConfig, address: str, attempt: int = 1) -> RunDir:
    run = RunDir(tmp_path / "e", attempt)
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("eval", config))
    run.publish_address("env/reverse_text", address)
    return run


def records(run: RunDir) -> list[dict[str, Any]]:
    return [record for _, record in read_stream(run.traces / "stream.jsonl")]


def test_an_evaluation_from_end_to_end(tmp_path: Path, chat: ChatEngine, env_address: str) -> None:
    config = evaluation(chat, client=make_config().client)
    config.client.headers = {"X-Team": "blue"}
    config.env["reverse_text"].sampling = SamplingConfig(temperature=0.0, max_tokens=9)
    run = prepare(tmp_path, config, env_address)
    asyncio.run(evaluate(config, run))
    results = collect(config, run)
    assert results is not None and results.complete
    (score,) = results.scores
    assert score.agents["agent"].avg.mean == 1.0 and score.agents["agent"].pass_hat[2].mean == 1.0
    assert len(read_rows(run)) == 8 == len({record["id"] for record in records(run)})
    request = chat.requests[0]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("chat", 0.0, 9)
    assert request["headers"]["X-Team"] == "blue" and "top_k" not in request
    assert chat.most_inflight <= 8
    shown = Progress.read(progress_file(run))
    assert shown is not None and shown.counts[0, "reverse_text"].done == 8
    nodes = records(run)[0]["traces"][0]["nodes"]
    assert nodes[-1]["sampled"] and nodes[-1]["content"].startswith("[")


@pytest.mark.parametrize("status", [429, 500, 503])
def test_faults_that_pass_leave_no_trace(
    tmp_path: Path, chat: ChatEngine, env_address: str, status: int
) -> None:
    tries: Counter[str] = Counter()

    def fails_four_times(messages: list[dict[str, Any]]) -> Any:
        tries[messages[-1]["content"]] += 1
        return status if tries[messages[-1]["content"]] <= 4 else reverse(messages)

    chat.answer = fails_four_times
    config = evaluation(chat, limit=3, group_size=1, concurrency=3)
    run = prepare(tmp_path, config, env_address)
    asyncio.run(evaluate(config, run))
    assert all(row.ok for row in read_rows(run).values()) and len(read_rows(run)) == 3
    assert set(tries.values()) == {5}
    assert {record["retries"] for record in records(run)} == {1}, (
        "the harness tries thrice, then the rollout again"
    )


def test_what_stays_broken_is_an_error_and_done_again_on_resume(
    tmp_path: Path, chat: ChatEngine, env_address: str
) -> None:
    words: list[str] = []

    def breaks_for_one_task(messages: list[dict[str, Any]]) -> Any:
        words.append(messages[-1]["content"])
        return 500 if messages[-1]["content"] == words[0] else reverse(messages)

    chat.answer = breaks_for_one_task
    config = evaluation(chat, rules={"retries": 0})
    run = prepare(tmp_path, config, env_address)
    asyncio.run(evaluate(config, run))
    before = read_rows(run)
    assert sorted(row.ok for row in before.values()) == [False, False] + [True] * 6
    assert {error for row in before.values() for error in row.errors} == {"ProviderError"}
    score = collect(config, run).scores[0]  # type: ignore[union-attr]
    assert (
        score.failed == 2 and score.agents["agent"].avg.mean == 1.0 and score.agents["agent"].avg.tasks == 3
    )

    chat.answer = reverse
    chat.requests.clear()
    more = evaluation(chat, limit=5, group_size=3)
    again = prepare(tmp_path, more, env_address, attempt=2)
    asyncio.run(evaluate(more, again))
    after = read_rows(again)
    assert len(after) == 15 and all(row.ok for row in after.values())
    assert len(chat.requests) == 15 - 6
    assert all(after[key].id == row.id for key, row in before.items() if row.ok)


def test_a_rollout_that_takes_too_long_is_an_error(
    tmp_path: Path, chat: ChatEngine, env_address: str
) -> None:
    chat.latency = 5.0
    config = evaluation(chat, limit=1, group_size=1)
    config.env["reverse_text"].timeout = 0.3
    run = prepare(tmp_path, config, env_address)
    asyncio.run(evaluate(config, run))
    (row,) = read_rows(run).values()
    assert row.errors == ("RolloutTimeout",)


def test_selection_is_in_the_taskset_s_order(tmp_path: Path, chat: ChatEngine, env_address: str) -> None:
    def words(**select: Any) -> list[str]:
        config = evaluation(chat, group_size=1, concurrency=1, select=SelectConfig(**select))
        run = prepare(tmp_path / str(random.random()), config, env_address)
        asyncio.run(evaluate(config, run))
        return [record["task"]["prompt"] for record in records(run)]

    first = words(limit=6)
    assert words(limit=6) == first and len(set(first)) == 6
    assert words(skip=2, limit=3) == first[2:5]
    picked = TaskMatchConfig(idx=[4, "0:2"])
    assert words(include=picked) == [first[0], first[1], first[4]]
    assert words(include=TaskMatchConfig(idx=["0:6"]), exclude=picked, limit=2) == [first[2], first[3]]
    shuffled = words(include=TaskMatchConfig(idx=["0:6"]), shuffle=True, seed=3)
    assert shuffled != first and sorted(shuffled) == sorted(first)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"limit": None}, "env.reverse_text: its taskset is endless; say how many of its tasks: -n 32"),
        (
            {"select": SelectConfig(shuffle=True, limit=3)},
            "env.reverse_text.select: .*infinite - cannot shuffle",
        ),
        (
            {"env": {"reverse_text": EnvConfig(taskset={"colour": 1})}},
            "env.reverse_text.taskset.colour = 1: no such",
        ),
    ],
)
def test_what_cannot_be_evaluated(
    tmp_path: Path, chat: ChatEngine, env_address: str, change: dict[str, Any], expected: str
) -> None:
    config = evaluation(chat, **change)
    with pytest.raises(ValueError, match=expected):
        asyncio.run(evaluate(config, prepare(tmp_path, config, env_address)))


def start_role(run: RunDir) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "launchers.role", "eval", str(run.resolved_config)]
    log = (run.configs / "role.log").open("w")
    return subprocess.Popen(command, env=role_environment(), cwd=run.path, stdout=log, stderr=log)


def test_kill_9_at_a_random_moment_then_resume(tmp_path: Path, chat: ChatEngine, env_address: str) -> None:
    chat.latency = 0.05
    config = evaluation(chat, limit=40, group_size=2, concurrency=4)
    run = prepare(tmp_path, config, env_address)
    role = start_role(run)
    enough = random.Random().randrange(5, 60)
    deadline = time.monotonic() + 120
    while len(records(run)) < enough:
        assert role.poll() is None and time.monotonic() < deadline, (run.configs / "role.log").read_text()
        time.sleep(0.01)
    role.kill()
    role.wait(10)
    before = {key: row.id for key, row in read_rows(run).items()}
    assert enough <= len(before) < 80
    with (run.traces / "stream.jsonl").open("ab") as stream:
        stream.write(b'{"id": "torn", "traces": [')

    chat.latency = 0.0
    chat.requests.clear()
    again = prepare(tmp_path, config, env_address, attempt=2)
    assert start_role(again).wait(180) == 0, (again.configs / "role.log").read_text()
    found = records(again)
    done = [(record["task_key"], record["rollout"]) for record in found]
    assert len(done) == len(set(done)) == 80, "every rollout exactly once"
    assert len({record["id"] for record in found}) == 80
    assert {key: read_rows(again)[key].id for key in before} == before, "what was finished was kept"
    assert 0 <= len(chat.requests) - (80 - len(before)) <= 4, "beside those that were in flight when it died"
    index = [json.loads(line) for line in (again.traces / "index.jsonl").read_text().splitlines()]
    assert {entry["id"] for entry in index} <= {record["id"] for record in found}


def test_the_role_fails_in_one_line(tmp_path: Path, chat: ChatEngine, env_address: str) -> None:
    chat.key = "secret"
    config = evaluation(chat)
    run = prepare(tmp_path, config, env_address)
    assert start_role(run).wait(120) == 1
    (line,) = (run.configs / "failure.txt").read_text().splitlines()
    assert "refuses the key (401)" in line
