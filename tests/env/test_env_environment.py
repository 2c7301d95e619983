"""`env.<name>` -> verifiers' configuration: ids, seats, defaults, and the wording of mistakes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import verifiers.v1 as vf
from env_server_process import make_config

from prl.config.sources import EnvConfig
from prl.env.environment import environment_config
from prl.env.plugins import register_taskset, shipped_tasksets
from prl.env.source import EnvSource


def built(name: str = "reverse_text", seed: int = 0, **options: object) -> vf.EnvConfig:
    return environment_config(name, EnvConfig(**options), seed)


def test_defaults_work_on_a_bare_machine() -> None:
    config = built(seed=7)
    assert (config.taskset.id, config.taskset.seed) == ("reverse_text", 7)
    assert config.agent.harness.id == "inprocess-chat"
    assert config.agent.runtime.type == "subprocess"


def test_an_environment_may_have_any_name() -> None:
    assert built("warm_up", id="reverse_text").taskset.id == "reverse_text"
    assert built("warm_up", id="reverse-text").taskset.id == "reverse-text"


def test_options_reach_the_taskset_and_the_seat() -> None:
    config = built(seed=7, taskset={"seed": 1, "max_length": 4}, agents={"agent": {"max_turns": 2}})
    assert (config.taskset.seed, config.taskset.max_length, config.agent.max_turns) == (1, 4, 2)
    assert config.agent.harness.id == "inprocess-chat"


def test_a_seat_may_choose_harness_and_runtime() -> None:
    config = built(agents={"agent": {"harness": "null", "runtime": {"type": "docker"}}})
    assert (config.agent.harness.id, config.agent.runtime.type) == ("null", "docker")
    config = built(agents={"agent": {"harness": {"tool_timeout": 5.0}}})
    assert (config.agent.harness.id, config.agent.harness.tool_timeout) == ("inprocess-chat", 5.0)


def test_every_seat_of_an_environment_gets_the_defaults() -> None:
    config = built("kuhn_poker", agents={"legal_weight": 0.25, "player1": {"max_turns": 3}})
    for seat in (config.player0, config.player1):
        assert (seat.harness.id, seat.runtime.type) == ("inprocess-chat", "subprocess")
    assert (config.legal_weight, config.player0.max_turns, config.player1.max_turns) == (0.25, None, 3)


def test_what_the_author_pinned_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = """
import verifiers.v1 as vf
class PinnedConfig(vf.EnvConfig):
    agent: vf.AgentConfig = vf.AgentConfig(harness={"id": "null"}, runtime={"type": "docker"})
class PinnedEnv(vf.Env[PinnedConfig]):
    async def run(self, task, agents): ...
class PinnedTaskset(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):
    def load(self): return []
__all__ = ["PinnedEnv", "PinnedTaskset"]
"""
    (tmp_path / "pinned_env.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    config = built("pinned_env")
    assert (config.agent.harness.id, config.agent.runtime.type) == ("null", "docker")


def test_modules_resolve_by_dotted_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_Envs"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "words.py").write_text(
        "from prl.env.tasksets.reverse_text import *\n__all__ = ['ReverseTextTaskset']"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = built("mine", id="my_Envs.words")
    assert vf.load_taskset(config.taskset).__class__.__name__ == "ReverseTextTaskset"


def test_shipped_modules_keep_their_names() -> None:
    register_taskset("arithmetic")
    assert sys.modules["verifiers.v1.tasksets.arithmetic"] is sys.modules["prl.env.tasksets.arithmetic"]
    assert "arithmetic" not in sys.modules


def test_verifiers_own_tasksets_are_still_there() -> None:
    register_taskset("harbor")
    assert sys.modules["verifiers.v1.tasksets.harbor"].__name__ == "verifiers.v1.tasksets.harbor"


def test_an_unknown_taskset_says_what_there_is() -> None:
    assert {"reverse_text", "arithmetic", "kuhn_poker", "proposer_solver"} <= set(shipped_tasksets())
    with pytest.raises(
        ValueError, match=r"no taskset 'revers_text': did you mean 'reverse_text'\? prl ships"
    ):
        built("revers_text")
    with pytest.raises(ValueError, match=r"no module 'no_such\.place' is importable"):
        built("x", id="no_such.place")


def test_a_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "needy_env.py").write_text("import not_installed_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="'needy_env' fails to import: No module named 'not_inst"):
        built("needy_env")


def test_a_module_without_a_taskset_is_refused() -> None:
    with pytest.raises(ValueError, match=r"taskset 'json': .*exports no Taskset"):
        built("json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"taskset": {"min_len": 3}},
            r"env\.reverse_text\.taskset\.min_len = 3: .* Nearest: min_length; valid: ",
        ),
        (
            {"taskset": {"min_length": 0}},
            r"env\.reverse_text: taskset\.min_length: .*greater than",
        ),
        ({"agents": {"agent": {"max_turn": 3}}}, r"env\.reverse_text: agent\.max_turn: Extra inputs"),
        (
            {"agents": {"agnt": {}}},
            r"env\.reverse_text\.agents has no agnt; seats of this env",
        ),
        ({"agents": {"taskset": {}}}, "agents has no taskset"),
    ],
)
def test_mistakes_name_their_place(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(**options)


def source(name: str, **options: object) -> EnvSource:
    config = make_config(**{name: EnvConfig(**options)})
    return EnvSource(name, config.env[name], config)


def test_endless_tasks_come_in_the_same_order() -> None:
    first, second = source("reverse_text"), source("reverse_text")
    assert first.endless
    keys = [next(first.tasks).key for _ in range(100)]
    assert keys == [next(second.tasks).key for _ in range(100)]
    assert len(set(keys)) == 100


def test_finite_tasks_are_shuffled_by_the_seed() -> None:
    config = make_config(arithmetic=EnvConfig(taskset={"num_tasks": 50, "seed": 1}))
    orders = []
    for seed in (0, 0, 1):
        config.seed = seed
        tasks = EnvSource("arithmetic", config.env["arithmetic"], config).tasks
        orders.append([task.data["idx"] for task in tasks])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == list(range(50))


def test_task_data_holds_every_field() -> None:
    task = source("arithmetic", taskset={"num_tasks": 1}).tasks[0]
    assert task.data["prompt"].startswith("add ") and task.data["idx"] == 0


def test_tasks_of_equal_key_and_empty_tasksets_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match=r"env\.scripted_tasks: tasks share a key"):
        source("scripted_tasks", taskset={"repeat": True})
    (tmp_path / "empty_env.py").write_text(
        "import verifiers.v1 as vf\n"
        "class Empty(vf.Taskset[vf.Task[vf.TaskData], vf.TasksetConfig]):\n"
        "    def load(self): return []\n"
        "__all__ = ['Empty']\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"env\.empty_env: no task is left"):
        source("empty_env")
