"""Environment variables by component: layers, protected names, and what reaches the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers.placement import place
from prl.config.compose import compose_job
from prl.config.env_vars import PROTECTED, variables

RESOLVED = Path("configs/attempt_1/resolved.yaml")


def test_own_layers_win_over_shared_ones(rl) -> None:
    words = ["env_vars.all.A=all", "env_vars.all.B=all", "env_vars.trainer.A=trainer", "env_vars.env.A=envs"]
    config = rl(*words, "env=[reverse_text,arithmetic]", "env.arithmetic.env_vars.A=sums")
    assert variables(config, "trainer/1") == {"A": "trainer", "B": "all"}
    assert variables(config, "env/reverse_text") == {"A": "envs", "B": "all"}
    assert variables(config, "env/arithmetic") == {"A": "sums", "B": "all"}
    assert variables(config, "orchestrator") == variables(config, "inference/0") == {"A": "all", "B": "all"}


def test_teachers_are_engines_and_evaluations_orchestrate(rl) -> None:
    config = rl("env_vars.inference.X=1", "algo=opd", "algo.teacher.model=tiny")
    assert variables(config, "teacher/shared") == variables(config, "inference") == {"X": "1"}
    config = compose_job("eval", ["env_vars.orchestrator.X=2"])
    assert variables(config, "eval") == {"X": "2"}
    assert variables(compose_job("sft", ["env_vars.trainer.X=3"]), "sft/0") == {"X": "3"}


def test_values_stay_text(rl) -> None:
    config = rl("env_vars.all.N=1_0", "env_vars.all.F=1e3", "env_vars.all.T=true")
    assert config.env_vars.all == {"N": "1_0", "F": "1e3", "T": "true"}


@pytest.mark.parametrize("name", [*PROTECTED, "PRL_FAMILY", "PRL_LAUNCHER_PID", "PRL_ANYTHING"])
def test_names_of_prl_are_refused(judge, name: str) -> None:
    (message,) = judge(f"env_vars.trainer.{name}=1")
    assert message == f"env_vars.trainer.{name} = 1: prl sets this variable itself. Leave it out."


def test_protected_names_are_refused_for_one_environment_too(judge) -> None:
    (message,) = judge("env.reverse_text.env_vars.RANK=1")
    assert message.startswith("env.reverse_text.env_vars.RANK = 1: prl sets")
    assert judge("env_vars.all.PRL_API_KEY=x") == []


def test_bad_names_and_absent_components_are_refused(judge, refused) -> None:
    assert judge("env_vars.all={a-b: x}") == ["env_vars.all.a-b = x: not a name of an environment variable."]
    (message,) = refused("env_vars.trainer.A=1", command="inference")
    assert message == "env_vars.trainer = A: prl inference has no such process. It has: inference."
    (message,) = judge("env_vars.trainers.A=1")
    assert "Nearest: env_vars.trainer;" in message


def test_a_secret_is_warned_of_and_not_shown(rl, caplog: pytest.LogCaptureFixture) -> None:
    rl("env_vars.all.HF_TOKEN=hunter2")
    assert "Export HF_TOKEN before the command instead." in caplog.text
    assert "hunter2" not in caplog.text


def test_processes_get_them_over_prls_own_defaults(rl) -> None:
    config = rl("env_vars.trainer.OMP_NUM_THREADS=7", "env_vars.all.TOKENIZERS_PARALLELISM=true")
    roles = {role.name: role.env for role in place("rl", config, RESOLVED, ["3"])}
    assert roles["trainer/0"]["OMP_NUM_THREADS"] == "7"
    assert roles["inference"]["OMP_NUM_THREADS"] == "1"
    assert {env["TOKENIZERS_PARALLELISM"] for env in roles.values()} == {"true"}
    assert roles["trainer/0"]["CUDA_VISIBLE_DEVICES"] == "3"


def test_nodes_of_a_cluster_get_them_too() -> None:
    from launchers.nodes import place_on_nodes

    config = compose_job("sft", ["cluster=slurm", "env_vars.trainer.A=x"])
    assert {role.env["A"] for role in place_on_nodes("sft", config, RESOLVED, {})} == {"x"}
