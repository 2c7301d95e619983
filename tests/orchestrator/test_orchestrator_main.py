"""The process on a real loop, with real sockets, files, algorithm, samples, packing and weight publisher.

Only the environment server, the engine and the optimizer step are stand-ins.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from orchestrator_fakes import FakeTask, make_episode

from prl.checkpoint.marker import mark_complete
from prl.config.algo import EndpointConfig, GrpoConfig, OpdConfig, SftAlgoConfig
from prl.config.curriculum import StandardConfig
from prl.config.evals import EvalEnvConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig
from prl.config.serving import EmbeddedConfig, SyncConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig
from prl.orchestrator import connect, eval_sources, main
from prl.records import Episode, MicroBatch
from prl.run_dir import RunDir
from prl.sync.filesystem import FilesystemPublisher, read_version
from prl.trainer.receiver import open_receiver

WAIT = 20.0


class Source:
    """Stands for `EnvSource`: twenty tasks; within a group every other rollout earns 1."""

    made: list[Source]

    def __init__(
        self, name: str, config: EnvConfig, run_config: RlConfig, evaluation: bool = False, seed: int = 0
    ) -> None:
        self.name = name
        self.evaluation, self.seed = evaluation, seed
        self.endless = bool(config.taskset.get("endless"))
        self.tasks = [FakeTask(f"{name}{i}", {"prompt": f"{name}{i}"}) for i in range(20)]
        self.calls: list[dict[str, Any]] = []
        self.address = ""
        self.closed = False
        Source.made.append(self)

    async def start(self, address: str, successor: Any = None) -> None:
        self.address = address

    async def run(self, task: Any, *, group_id: str, **request: Any) -> Episode:
        number = len(self.calls)
        self.calls.append({"task": task.key, "group": group_id, **request})
        await asyncio.sleep(0.002)
        return make_episode(task.key, float(number % 2), env=self.name, group_id=group_id)

    async def close(self) -> None:
        self.closed = True


class Admin:
    """Stands for `EngineAdmin`: reads back the fingerprint of the files that it is told to serve."""

    def __init__(self, base_url: str, timeout: float, *access: Any, **options: Any) -> None:
        self.root = base_url
        self.served: list[int] = []
        Admin.last = self

    async def wait_ready(self, model: str, seconds: float) -> None:
        assert model == "tiny"

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def update_weights(self, weight_dir: str, version: int) -> dict[str, Any]:
        found = read_version(Path(weight_dir).parent, version)
        self.served.append(version)
        return {"version": version, "fingerprint": found.fingerprint, "seconds": 0.0}

    async def aclose(self) -> None: ...


class Scorer:
    """Stands for `LogprobScorer`; `speaks` tells whether the endpoint takes token ids."""

    speaks = True

    def __init__(self, base_url: str, model: str, *access: Any) -> None:
        self.model, self.access = model, access

    async def score(self, token_ids: list[int], cache_salt: str | None = None) -> list[float]:
        if not self.speaks:
            raise ValueError("http://127.0.0.1:9 answered 404")
        return [0.0] * len(token_ids)

    async def aclose(self) -> None: ...


class Trainer(threading.Thread):
    """Fetches batch after batch as every rank, publishes a version after each."""

    def __init__(self, run: RunDir, config: RlConfig, first: int) -> None:
        super().__init__(daemon=True)
        self.run_dir, self.config, self.first = run, config, first
        self.batches: dict[int, list[list[MicroBatch]]] = {}
        self.publisher = FilesystemPublisher(run.broadcasts, SyncConfig())

    def publish(self, version: int) -> None:
        self.publisher.publish(version, [("w", torch.full((4,), float(version)))])

    def run(self) -> None:
        self.publish(self.first - 1)
        address = self.run_dir.wait_for_address_blocking("orchestrator", WAIT)
        world = self.config.cluster.train_ranks
        receivers = [open_receiver(address, rank, world) for rank in range(world)]
        for step in range(self.first, self.config.max_steps + 1):
            self.batches[step] = [receiver.receive(step, WAIT) for receiver in receivers]
            time.sleep(0.01)
            self.publish(step)
        for receiver in receivers:
            receiver.close()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    Source.made = []
    monkeypatch.setattr(connect, "EnvSource", Source)
    monkeypatch.setattr(eval_sources, "EnvSource", Source)
    monkeypatch.setattr(connect, "EngineAdmin", Admin)
    monkeypatch.setattr(connect, "LogprobScorer", Scorer)


def config(max_steps: int = 4, **changes: Any) -> RlConfig:
    values = {
        "algo": GrpoConfig(), "loss": IpoConfig(), "model": ModelConfig(name="tiny"), "optim": AdamWConfig(),
        "env": {"a": EnvConfig(), "b": EnvConfig(ratio=2.0)}, "scheduler": SchedulerConfig(),
        "inference": EmbeddedConfig(), "tracking": TrackingConfig(), "curriculum": StandardConfig(),
    }  # fmt: skip
    made = RlConfig(**{**values, **changes}, max_steps=max_steps)
    made.rollout.batch_size, made.rollout.group_size, made.rollout.max_off_policy_steps = 8, 2, 2
    made.cluster.train_ranks = 2
    made.ckpt.interval = 2
    return made


def addresses(run: RunDir, *roles: str) -> None:
    for role in ("inference", "env/a", "env/b", *roles):
        run.publish_address(role, "http://127.0.0.1:9" if "env" not in role else "tcp://127.0.0.1:9")


def train(run: RunDir, cfg: RlConfig, first: int = 1) -> Trainer:
    trainer = Trainer(run, cfg, first)
    trainer.start()
    main.main(cfg, run, "orchestrator")
    trainer.join(WAIT)
    assert not trainer.is_alive()
    return trainer


def complete(checkpoint: Path) -> Path:
    """What the trainer adds to a checkpoint."""
    (checkpoint / "trainer").mkdir()
    (checkpoint / "trainer" / "weights").write_text("w")
    mark_complete(checkpoint)
    return checkpoint


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_whole_run(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), config()
    addresses(run)
    trainer = train(run, cfg)
    served = Admin.last.served
    assert sorted(trainer.batches) == [1, 2, 3, 4] and (served[0], served[-1]) == (0, 4)
    for ranks in trainer.batches.values():
        assert len({len(micro_batches) for micro_batches in ranks}) == 1
        members = [i for rank in ranks for row in rank for i in row.trace_ids if i]
        assert len(members) == len(set(members)) == 8
    steps = [row for row in lines(run.metric_file("orchestrator")) if "time/step" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert [row["train/agg/effective/agent/reward/mean"] for row in steps] == [0.5] * 4
    assert max(row["off_policy/max"] for row in steps) <= 2
    annotated = lines(run.traces / "annotations.jsonl")
    assert [row["step"] for row in annotated] == [step for step in (1, 2, 3, 4) for _ in range(8)]
    arrived = {trace["id"] for row in lines(run.traces / "stream.jsonl") for trace in row["traces"]}
    assert {row["trace"] for row in annotated} <= arrived
    assert all(source.closed and source.address.startswith("tcp://") for source in Source.made)
    assert {path.name for path in run.checkpoints.iterdir()} == {"step_2", "step_4"}


def test_a_run_that_evaluates_and_ships_through_files(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), config()
    cfg.rollout.transport = "filesystem"
    cfg.eval.env = {"x": EvalEnvConfig(interval=2, group_size=3)}
    cfg.eval.sampling.temperature = 0.5
    addresses(run, "env/eval/x")
    trainer = train(run, cfg)
    assert sorted(trainer.batches) == [1, 2, 3, 4] and (run.batches / "step_4" / "rank_1.bin").is_file()
    rows = [row for row in lines(run.metric_file("orchestrator")) if "eval/x/policy_version" in row]
    assert [(row["step"], row["eval/x/policy_version"]) for row in rows] == [(0, 0), (2, 2), (4, 4)]
    (source,) = [source for source in Source.made if source.evaluation]
    assert source.closed and source.seed == cfg.seed + 1 and len(source.calls) == 3 * 60
    assert all(not call["train"] and call["sampling"] == {"temperature": 0.5} for call in source.calls)
    index = lines(run.traces / "index.jsonl")
    assert sum(row["kind"] == "eval" for row in index) == 180 and any(row["kind"] == "train" for row in index)
    (state,) = lines(run.checkpoints / "step_4" / "orchestrator" / "state.json")
    assert state["evals"]["seen"] in (2, 3)


def test_endless_evaluations_are_refused(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), config()
    cfg.eval.env = {"x": EvalEnvConfig(taskset={"endless": True})}
    addresses(run, "env/eval/x")
    with pytest.raises(
        ValueError, match=r"eval\.env\.x: its tasks never end; set eval\.env\.x\.select\.limit=32"
    ):
        main.main(cfg, run, "orchestrator")


def test_p16_a_resumed_process_goes_on_with_the_tasks_it_owes(tmp_path: Path) -> None:
    run = RunDir(tmp_path, 1)
    addresses(run)
    train(run, config())
    checkpoint = complete(run.checkpoints / "step_2")
    (state,) = lines(checkpoint / "orchestrator" / "state.json")
    assert state["step"] == 2 and state["totals"]["rollouts"] >= 16

    Source.made = []
    second, cfg = RunDir(tmp_path, 2), config(max_steps=5)
    cfg.run.resume = str(checkpoint)
    addresses(second)
    resumed = train(second, cfg, first=3)
    assert sorted(resumed.batches) == [3, 4, 5] and Admin.last.served[0] == 2
    opened = {call["group"]: call["task"] for source in Source.made for call in source.calls}
    indices = sorted(int(group.removeprefix("2-")) for group in opened)
    owed = {draw["index"]: draw["key"] for draw in state["tasks"]["pending"]}
    new = [index for index in indices if index not in owed]
    assert all(opened[f"2-{index}"] == key for index, key in owed.items())
    assert new == list(range(state["tasks"]["count"], state["tasks"]["count"] + len(new)))


def test_a_run_past_its_end_is_over_at_once(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), config(max_steps=3)
    addresses(run)
    train(run, cfg)
    cfg.run.resume, cfg.max_steps = str(complete(run.checkpoints / "step_2")), 2
    assert train(RunDir(tmp_path), cfg, first=3).batches == {}


def test_a_damaged_checkpoint_is_not_used(tmp_path: Path) -> None:
    run, cfg = RunDir(tmp_path), config()
    addresses(run)
    checkpoint = run.checkpoints / "step_2"
    for part in ("trainer", "orchestrator"):
        (checkpoint / part).mkdir(parents=True)
        (checkpoint / part / "state.json").write_text('{"format": 1, "st')
    mark_complete(checkpoint)
    cfg.run.resume = str(checkpoint)
    with pytest.raises(ValueError, match="damaged"):
        main.main(cfg, run, "orchestrator")


def test_other_weights_in_the_engine_end_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def forgets(self: Admin, weight_dir: str, version: int) -> dict[str, Any]:
        return {"version": version, "fingerprint": "stale", "seconds": 0.0}

    monkeypatch.setattr(Admin, "update_weights", forgets)
    run, cfg = RunDir(tmp_path), config()
    addresses(run)
    Trainer(run, cfg, 1).publish(0)
    with pytest.raises(RuntimeError, match="fingerprint stale"):
        main.main(cfg, run, "orchestrator")


def connected(tmp_path: Path, cfg: RlConfig, *roles: str) -> connect.Connected:
    import contextlib

    run = RunDir(tmp_path)
    addresses(run, *roles)

    async def scenario() -> connect.Connected:
        async with contextlib.AsyncExitStack() as stack:
            return await connect.connect(cfg, run, stack)

    return asyncio.run(scenario())


def test_b21_a_frozen_teacher_samples_for_sft_without_salt_or_age(tmp_path: Path) -> None:
    own = SftAlgoConfig(teacher=EndpointConfig(model="big"))
    it = connected(tmp_path, config(env={"a": EnvConfig(algo=own), "b": EnvConfig()}), "teacher/a")
    assert it.sources["a"].frozen and it.sources["a"].model == "big"
    assert it.sources["a"].base_url == "http://127.0.0.1:9/v1"
    assert not it.sources["b"].frozen and it.sources["b"].model == "tiny"
    assert it.algorithms["a"].action_loss == "ce" and it.algorithms["b"].action_loss == "rl"


def test_a_teacher_scores_for_opd(tmp_path: Path) -> None:
    it = connected(tmp_path, config(algo=OpdConfig(teacher=EndpointConfig(model="big"))), "teacher/shared")
    assert not it.sources["a"].frozen, "the policy samples, the teacher only scores"
    assert it.algorithms["a"].teacher.model == "big"


def test_a_teacher_that_cannot_score_is_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "speaks", False)
    algo = OpdConfig(teacher=EndpointConfig(model="big", base_url="http://127.0.0.1:9/v1"))
    with pytest.raises(ValueError, match=r"env\.a: teacher 'big' at .*404"):
        connected(tmp_path, config(algo=algo))


def test_a_sampling_teacher_is_reached_with_its_own_key(tmp_path: Path) -> None:
    teacher = EndpointConfig(
        model="big", base_url="http://127.0.0.1:9/v1", api_key_var="BIG_KEY", headers={"x": "1"}
    )
    it = connected(tmp_path, config(env={"a": EnvConfig(algo=SftAlgoConfig(teacher=teacher))}))
    asyncio.run(it.sources["a"].run(FakeTask("t", {}), group_id="g"))
    (call,) = Source.made[0].calls
    assert call["access"] == {"api_key_var": "BIG_KEY", "headers": {"x": "1"}}


def test_the_prefix_of_opsd_is_one_system_message(tmp_path: Path) -> None:
    render = connect._prefix_renderer(config())
    ids = render("ab")
    assert ids[0] == 3 and ids[-1] == 7 and len(ids) == 4, "<|system|> a b <|end|>, no generation prompt"


def test_patience_outlasts_every_other_timeout() -> None:
    cfg = config(env={"a": EnvConfig(timeout=50.0), "b": EnvConfig(timeout=500.0)})
    assert main.patience(cfg) > 500 + cfg.trainer.dist_timeout
