"""One evaluation is one model, one way of sampling, one set of environments."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from evals_lab import make_config

from launchers.run_directory import plan_by_name
from prl.assets import bundled_model
from prl.config.compose import compose_job
from prl.config.load import dump_resolved
from prl.config.schema import RunConfig
from prl.config.serving import EmbeddedConfig
from prl.config.sources import EnvConfig, SelectConfig
from prl.config.training import ModelConfig
from prl.evals.identity import changes, check_same, note_weights
from prl.evals.sources import merge_envs
from prl.run_dir import RunDir


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*words: str) -> Any:
    """A config with `path=value` set on it; composing one takes a hundred times longer."""
    found = make_config(
        env={"reverse_text": EnvConfig()},
        model=ModelConfig(name="tiny"),
        inference=EmbeddedConfig(),
        run=RunConfig(name="e"),
        select=SelectConfig(limit=4),
    )
    for word in words:
        path, _, value = word.partition("=")
        *parents, key = path.split(".")
        node: Any = found
        for name in parents:
            node = node.setdefault(name, {}) if isinstance(node, dict) else getattr(node, name)
        set_in = node.__setitem__ if isinstance(node, dict) else partial(setattr, node)
        set_in(key, yaml.safe_load(value))
    merge_envs(found)
    return found


def attempt(number: int, *words: str) -> RunDir:
    run = RunDir(Path("outputs/e").absolute(), number)
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("eval", config(*words)))
    note_weights(config(*words), run)
    return run


@pytest.mark.parametrize(
    "words",
    [
        ["select.limit=9", "rollout.group_size=3", "select.shuffle=true"],
        ["concurrency=3", "eval.errors=zero", "eval.retries=0", "log.level=debug"],
        ["env.reverse_text.workers=2", "env.reverse_text.select.skip=1"],
        ["inference.name=vllm"],
        ["tracking.name=mlflow", "cluster.grace=1", "inference.threads=2"],
    ],
)
def test_what_may_change(words: list[str]) -> None:
    assert changes(config(), config(*words)) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["rollout.sampling.temperature=0.5"], "env.reverse_text.sampling.temperature: null -> 0.5"),
        (["env.reverse_text.taskset.max_length=4"], "env.reverse_text.taskset.max_length: absent -> 4"),
        (["shared.agents.agent.max_turns=4"], "env.reverse_text.agents.agent.max_turns: absent -> 4"),
        (["model.name=tiny_teacher"], "model.name: tiny -> tiny_teacher"),
        (["seed=1"], "seed: 0 -> 1"),
        (["inference.name=external"], "inference.name: embedded -> external"),
        (["inference.max_model_len=64"], "inference.max_model_len: 512 -> 64"),
    ],
)
def test_what_may_not(words: list[str], expected: str) -> None:
    assert expected in changes(config(), config(*words))
    attempt(1)
    with pytest.raises(ValueError, match="measured something else") as caught:
        check_same(config(*words), Path("outputs/e"))
    assert expected in str(caught.value)


def test_another_environment_is_another_evaluation() -> None:
    more = config()
    more.env["arithmetic"] = EnvConfig()
    assert "env.arithmetic.id: absent -> null" in changes(config(), more)


def test_the_newest_attempt_is_compared() -> None:
    attempt(2, "seed=1")
    attempt(10, "seed=2")
    check_same(config("seed=2"), Path("outputs/e"))
    with pytest.raises(ValueError, match="seed: 2 -> 1"):
        check_same(config("seed=1"), Path("outputs/e"))


def test_weights_written_anew_are_another_model(tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(bundled_model("tiny"), copy)
    attempt(1, f"model.path={copy}")
    check_same(config(f"model.path={copy}"), Path("outputs/e"))
    (copy / "model.safetensors").touch()
    with pytest.raises(ValueError, match=r"weights: model.safetensors was written anew"):
        check_same(config(f"model.path={copy}"), Path("outputs/e"))


def test_a_training_run_is_no_evaluation() -> None:
    run = RunDir(Path("outputs/e").absolute())
    run.configs.mkdir(parents=True)
    run.resolved_config.write_text(dump_resolved("rl", compose_job("rl", [])))
    with pytest.raises(ValueError, match="a run of `prl rl`, not an evaluation"):
        check_same(config(), Path("outputs/e"))


def test_where_an_evaluation_lives() -> None:
    fresh = config()
    assert not plan_by_name(fresh).continues
    with pytest.raises(ValueError, match=r"there is no run .*outputs/e"):
        plan_by_name(config("run.resume=latest"))
    attempt(1)
    assert plan_by_name(config("run.resume=latest")).continues
    assert not plan_by_name(config("run.clean=true")).continues
    with pytest.raises(ValueError, match=r"Continue it by run.resume=latest"):
        plan_by_name(fresh)
    Path("outputs/e/configs").rename("outputs/e/other")
    with pytest.raises(ValueError, match=r"exists. Choose another run.name"):
        fresh.run.resume = "latest"
        plan_by_name(fresh)
