"""How algorithms are found: by name, or in a user's own package."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap

import pytest
from algo_builders import advantages, group

from prl.algo import ALGORITHMS, algorithm_class, build_algorithm
from prl.algo.samples import build_samples
from prl.config.algo import AlgoConfig, GrpoConfig
from prl.config.load import build, group_schema


@pytest.fixture
def user_package(tmp_path, monkeypatch):
    """A package of the user's own with one algorithm: the reward itself, scaled, is the advantage."""
    (tmp_path / "my_research").mkdir()
    (tmp_path / "my_research" / "__init__.py").write_text("")
    (tmp_path / "my_research" / "reinforce.py").write_text(
        textwrap.dedent("""
        from prl.algo import Algorithm
        from prl.algo.credit import assign_advantage

        class Reinforce(Algorithm):
            def __init__(self, config, services, *, scale=1.0):
                super().__init__(config, services)
                self.scale = scale

            async def score_episode(self, episode):
                for trace in episode.trainable_traces:
                    assign_advantage(trace, self.scale * trace.reward)

        class NotAnAlgorithm:
            pass
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("my_research")]:
        del sys.modules[name]


def user_config(name="Reinforce", **kwargs) -> AlgoConfig:
    node = {"name": "reinforce", "import_path": f"my_research.reinforce:{name}", "kwargs": kwargs}
    return build(group_schema("algo", node), node)


def test_a_users_algorithm_trains_without_touching_prl(user_package):
    algorithm = build_algorithm(user_config(scale=2.0), env="reverse_text")
    episodes = group([1.0, 0.25])
    for ep in episodes:
        asyncio.run(algorithm.score_episode(ep))
    asyncio.run(algorithm.score_group(episodes))
    assert advantages(episodes) == [2.0, 0.5]
    built = build_samples(
        episodes[0].traces[0], env="mine", action_loss=algorithm.action_loss, temperature=1.0, seq_len=64
    )
    assert built.samples[0].advantages == [0.0, 0.0, 0.0, 2.0, 2.0, 2.0]
    assert algorithm.state_dict() == {}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AlgoConfig(name="gpro"), r"algo\.name='gpro' is unknown; choose one of grpo, max_rl"),
        (AlgoConfig(name="x", import_path="my_research.reinforce"), r"package\.module:Name"),
        (AlgoConfig(name="x", import_path="no_such_package:X"), "no module 'no_such_package'"),
        (
            AlgoConfig(name="x", import_path="my_research.reinforce:Nope"),
            r"has no 'Nope'; it has .*Reinforce",
        ),
        (
            AlgoConfig(name="x", import_path="my_research.reinforce:NotAnAlgorithm"),
            r"subclass of prl\.algo\.Algorithm",
        ),
        (AlgoConfig(name="x", import_path="my_research.reinforce:Reinforce", kwargs={"sacle": 2}), "'sacle'"),
        (GrpoConfig(kwargs={"scale": 2}), "does not fit Grpo.*'scale'"),
    ],
)
def test_what_cannot_be_built_says_why(user_package, config, message):
    with pytest.raises(ValueError, match=message):
        build_algorithm(config, env="reverse_text")


def test_every_shipped_algorithm_has_a_schema_and_a_class():
    facts = {}
    for name in ALGORITHMS:
        config = build(group_schema("algo", {"name": name}), {"name": name})
        cls = algorithm_class(config)
        facts[name] = (cls.action_loss, cls.sampled_by)
    assert facts == {
        "grpo": ("rl", "policy"),
        "max_rl": ("rl", "policy"),
        "rae": ("rl", "policy"),
        "hierarchical_grpo": ("rl", "policy"),
        "opd": ("ref_kl", "policy"),
        "opsd": ("ref_kl", "policy"),
        "sft": ("ce", "teacher"),
        "echo": ("rl", "policy"),
    }


def test_state_of_another_algorithm_is_refused():
    algorithm = build_algorithm(GrpoConfig(), env="reverse_text")
    algorithm.load_state_dict({})
    with pytest.raises(ValueError, match=r"'grpo' keeps no state.*baselines"):
        algorithm.load_state_dict({"baselines": {}})


def test_the_hooks_that_an_algorithm_leaves_out_do_nothing():
    algorithm, episodes = build_algorithm(GrpoConfig(), env="reverse_text"), group([1.0])
    asyncio.run(algorithm.setup())
    asyncio.run(algorithm.score_episode(episodes[0]))
    assert advantages(episodes) == [None]


def test_algorithms_and_curricula_import_nothing_heavy():
    modules = ", ".join({path.partition(":")[0] for path in ALGORITHMS.values()})
    code = (
        f"import sys, prl.algo.samples, prl.curriculum.base, {modules}\n"
        "print({'torch', 'transformers', 'verifiers', 'deepspeed', 'mlflow'} & set(sys.modules))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "set()\n"
    )
