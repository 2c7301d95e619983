"""Evaluations beside the trainer: versions are held, loaded in order, and evaluated one at a time."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from prl.checkpoint import stop
from prl.config.compose import compose_job
from prl.env.source import Task
from prl.orchestrator.eval_epoch import Evals, EvalSource
from prl.records import Episode, Trace
from prl.run_dir import RunDir
from prl.sft.evals import Follower, hold
from prl.sync.versions import read_version


def publish(run: RunDir, version: int) -> Path:
    directory = run.broadcasts / f"step_{version}"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_text(f"weights {version}")
    fields = {"version": version, "path": str(directory), "fingerprint": f"f{version}", "num_bytes": 9}
    (directory / "COMPLETE.json").write_text(json.dumps(fields))
    return directory


class Engine:
    """Answers with the fingerprint of what it was given, and notes it."""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weight_dir: str, version: int) -> dict[str, Any]:
        self.loaded.append((Path(weight_dir) / "model.safetensors").read_text())
        return {"version": version, "fingerprint": f"f{version}", "seconds": 0.0}


class Lab:
    """A follower of a run whose trainer is the test."""

    def __init__(self, path: Path, *words: str) -> None:
        self.config = compose_job("sft", ["eval.env=[reverse_text]", *words])
        self.run = RunDir(path)
        self.engine = Engine()
        self.reported: list[tuple[int, float]] = []
        self.served: list[str] = []
        self.flushed = 0
        self.evals = Evals([self._source()], last=self.config.max_steps, pinned=True, report=self._report)
        self.follower = Follower(self.config, self.run, self.evals, self.engine, lambda *_: None, self._flush)

    def _source(self) -> EvalSource:
        interval = self.config.eval.interval
        return EvalSource("reverse_text", self._episode, [Task("t", {})], 2, interval, {}, 60.0, "", "tiny")

    async def _episode(self, task: Task, **_: Any) -> Episode:
        self.served.append(self.engine.loaded[-1])
        self.between()
        trace = Trace("t", "agent", [], [], 1.0, is_completed=True)
        return Episode("e", "reverse_text", "g", task.key, {}, [trace])

    def between(self) -> None:
        """What the trainer does during a rollout."""

    def _report(self, values: dict[str, float], version: int) -> None:
        self.reported.append((version, values["eval/reverse_text/policy_version"]))

    async def _flush(self) -> None:
        self.flushed += 1


def test_every_due_version_is_evaluated_on_exactly_its_weights(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=5", "eval.interval=2")
    for version in (0, 2, 4, 5):
        publish(lab.run, version)
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.engine.loaded == [f"weights {v}" for v in (0, 2, 4, 5)]
    assert lab.reported == [(0, 0), (2, 2), (4, 4), (5, 5)]
    assert lab.served == [f"weights {v}" for v in (0, 0, 2, 2, 4, 4, 5, 5)] and lab.flushed == 4
    assert not (lab.run.broadcasts / ".evaluated").exists()


def test_a_version_that_is_taken_away_while_it_is_evaluated_does_no_harm(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=6", "eval.interval=2")
    publish(lab.run, 0)

    def train() -> None:
        """The trainer is quick: it goes to its end and keeps the last two versions."""
        for version in (2, 4, 6):
            if not (lab.run.broadcasts / f"step_{version}").exists() and version > 2:
                publish(lab.run, version)
        shutil.rmtree(lab.run.broadcasts / "step_0", ignore_errors=True)

    lab.between = train
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.reported == [(0, 0), (4, 4), (6, 6)], "v2 was never seen; its evaluation is that of v4"


def test_a_resumed_run_evaluates_what_comes_next(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=6", "eval.interval=2")
    lab.config.run.resume = str(tmp_path / "checkpoints" / "step_2")
    lab.follower = Follower(lab.config, lab.run, lab.evals, lab.engine, lambda *_: None, lab._flush)
    for version in (2, 4, 6):
        publish(lab.run, version)
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.engine.loaded[0] == "weights 2" and lab.reported == [(4, 4), (6, 6)]


def test_the_first_evaluation_can_be_left_out(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=2", "eval.interval=2", "eval.skip_first_step=true")
    publish(lab.run, 0)
    publish(lab.run, 2)
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.reported == [(2, 2)]


def test_a_dead_environment_ends_the_role(tmp_path: Path) -> None:
    from prl.env.source import EnvServerDied

    lab = Lab(tmp_path, "max_steps=2")
    publish(lab.run, 0)

    def die() -> None:
        raise EnvServerDied("gone")

    lab.between = die
    with pytest.raises(ExceptionGroup) as caught:
        asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert caught.group_contains(EnvServerDied)


def test_a_run_that_stops_on_request_ends_its_evaluations(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=9", "eval.interval=2", "eval.max_inflight=1")
    publish(lab.run, 0)
    lab.between = lambda: stop.tell_stopped(lab.run, 3)
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.reported == [(0, 0)] and lab.evals.idle
    lab.served.clear()
    asyncio.run(asyncio.wait_for(lab.follower.run(), 60))
    assert lab.served == []


def test_an_evaluation_that_a_stop_cuts_short_reports_what_it_has(tmp_path: Path) -> None:
    lab = Lab(tmp_path, "max_steps=9", "eval.max_inflight=1")
    publish(lab.run, 0)
    answer = lab._episode

    async def slow(task: Task, **options: Any) -> Episode:
        if lab.served:
            stop.tell_stopped(lab.run, 3)
            await asyncio.sleep(60)
        return await answer(task, **options)

    lab.evals._sources["reverse_text"] = replace(lab._source(), run=slow)
    asyncio.run(asyncio.wait_for(lab.follower.run(), 30))
    assert len(lab.served) == 1 and lab.reported == [(0, 0)] and lab.evals.idle


def test_the_roles_of_a_run_with_evaluations(tmp_path: Path) -> None:
    from launchers.placement import place

    with_evals = compose_job("sft", ["eval.env=[reverse_text]", "cluster.train_ranks=2"])
    names = [role.name for role in place("sft", with_evals, tmp_path / "resolved.yaml", [])]
    assert names == ["inference", "env/eval/reverse_text", "evals", "sft/0", "sft/1"]
    without = [role.name for role in place("sft", compose_job("sft", []), tmp_path / "resolved.yaml", [])]
    assert without == ["sft/0"]


def test_holding_a_version_keeps_its_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    directory = publish(run, 3)
    held = hold(read_version(run.broadcasts, 3), tmp_path / "held")
    shutil.rmtree(directory)
    assert (Path(held.path) / "model.safetensors").read_text() == "weights 3"
    assert (held.version, held.fingerprint) == (3, "f3")
    publish(run, 4)
    hold(read_version(run.broadcasts, 4), tmp_path / "held")
    assert (tmp_path / "held" / "model.safetensors").read_text() == "weights 4"
