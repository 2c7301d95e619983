"""Every option of every group and every experiment composes; option files keep to their form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from prl.config import algo, loss, serving, training
from prl.config.compose import compose_job
from prl.config.load import dump_resolved, load_resolved
from prl.config.options import headline, split_audience
from prl.config.schema import GROUPS, JOBS
from prl.config.sources import EnvConfig
from prl.config.store import conf_dir

CONF = conf_dir()

NEEDS = {
    "algo/hierarchical_grpo": ["env=[proposer_solver]"],
    "algo/opd": ["algo.teacher.model=tiny"],
    "algo/sft": ["algo.teacher.model=tiny"],
    "loss/custom": ["loss.import_path=package.module:function"],
    "data/rows": ["data.path=bundled:reverse_text"],
    "inference/external": ["inference.base_url=http://127.0.0.1:8000/v1"],
    "inference/vllm": [f"inference.python={sys.executable}"],
}
"""What an option cannot do without."""

HIDDEN = ("hydra", "recipe")


def option_files() -> list[str]:
    paths = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
    return [
        str(path.with_suffix("")) for path in paths if len(path.parts) > 1 and path.parts[0] not in HIDDEN
    ]


def command_of(option: str) -> str:
    audience = split_audience(headline((CONF / f"{option}.yaml").read_text()))[0]
    return audience or ("sft" if option.startswith("data/") else "rl")


@pytest.mark.parametrize("option", option_files())
def test_every_option_composes(option: str) -> None:
    group, _, name = option.rpartition("/")
    choice = f"{group}=[{name}]" if group == "env" else f"{group}={name}"
    command = command_of(option)
    config = compose_job(command, [choice, *NEEDS.get(option, [])])
    if group in GROUPS:
        chosen = getattr(config, group)
        assert type(chosen) is GROUPS[group][chosen.name]
    if group == "env":
        assert list(config.env) == [name]


def test_every_shipped_choice_has_an_option_file() -> None:
    missing = [f"{group}/{name}" for group, options in GROUPS.items() for name in options]
    assert [option for option in missing if option not in option_files()] == []


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONF)))
def test_option_files_open_with_when_to_choose_them(path: Path) -> None:
    comment = headline(path.read_text())
    assert len(comment) > 20 and comment.endswith(".")
    assert all(len(line) <= 120 for line in path.read_text().splitlines())


SCHEMAS = dict(GROUPS) | {
    "model": {"": training.ModelConfig},
    "zero": {"": training.ZeroConfig},
    "ckpt": {"": training.CkptConfig},
    "env": {"": EnvConfig},
    "cluster": GROUPS["cluster"] | {"laptop": GROUPS["cluster"]["local"], "": GROUPS["cluster"]["slurm"]},
}


def schema_of(option: str) -> type:
    """The schema that an option file names in its defaults, or that of the option it is based on."""
    group, _, name = option.rpartition("/")
    for entry in (yaml.safe_load((CONF / f"{option}.yaml").read_text()) or {}).get("defaults", []):
        if isinstance(entry, str) and entry.startswith(f"/schema/{group}/"):
            return SCHEMAS[group][entry.rpartition("/")[2].partition("@")[0]]
        if isinstance(entry, str) and (CONF / group / f"{entry}.yaml").is_file():
            return schema_of(f"{group}/{entry}")
    return SCHEMAS[group].get(name) or SCHEMAS[group][""]


@pytest.mark.parametrize("option", [o for o in option_files() if o.split("/")[0] in SCHEMAS])
def test_options_hold_only_what_differs_from_the_schema(option: str) -> None:
    schema = schema_of(option)
    body = yaml.safe_load((CONF / f"{option}.yaml").read_text()) or {}
    body.pop("defaults", None)
    repeated = {key for key, value in body.items() if getattr(schema(), key) == value}
    assert repeated <= {"stage"}  # zero=1 says its stage like its siblings


def test_the_default_command_is_the_documented_one() -> None:
    config = compose_job("rl", [])
    assert (config.algo, config.zero.stage) == (algo.GrpoConfig(), 1)
    assert config.loss == loss.IpoConfig()
    assert (config.model.name, list(config.env)) == ("tiny", ["reverse_text"])
    assert config.optim == training.AdamWConfig(lr=3e-4, betas=[0.9, 0.99])
    assert config.scheduler == training.SchedulerConfig()
    assert (config.inference, config.sync) == (serving.EmbeddedConfig(), serving.SyncConfig())
    assert (config.cluster, config.tracking) == (serving.ClusterConfig(), serving.MlflowConfig())
    assert config.ckpt == training.CkptConfig()
    assert (config.rollout.batch_size, config.rollout.group_size) == (128, 16)
    assert (config.rollout.max_off_policy_steps, config.rollout.sampling.max_tokens) == (2, 13)
    assert (config.trainer.seq_len, config.max_steps, config.output_dir) == (512, 30, "outputs")


def test_every_default_can_be_overridden_beside_its_recipe() -> None:
    config = compose_job(
        "rl", ["optim.lr=1e-3", "rollout.group_size=8", "max_steps=5", "trainer.seq_len=600"]
    )
    assert (config.optim.lr, config.rollout.group_size, config.max_steps) == (1e-3, 8, 5)
    assert config.trainer.seq_len == 600


def test_two_environments_with_their_own_settings() -> None:
    words = ["env=[reverse_text,arithmetic]", "env.arithmetic.ratio=2", "+algo@env.arithmetic.algo=echo"]
    config = compose_job(
        "rl", [*words, "env.arithmetic.algo.roles.user.alpha=0.5", "+env.third.id=reverse_text"]
    )
    assert list(config.env) == ["reverse_text", "arithmetic", "third"]
    assert config.env["arithmetic"].ratio == 2.0 and isinstance(config.env["arithmetic"].ratio, float)
    assert config.env["arithmetic"].algo == algo.EchoConfig(roles={"user": algo.EchoRoleConfig(0.5)})
    assert config.env["third"] == EnvConfig(id="reverse_text")
    assert config.algo == algo.GrpoConfig()


def test_the_algorithm_of_an_environment_is_chosen_like_that_of_the_run() -> None:
    plain = ["env=[reverse_text,arithmetic]", "env.arithmetic.algo=echo"]
    spelled = ["env=[reverse_text,arithmetic]", "+algo@env.arithmetic.algo=echo"]
    pools = "env.reverse_text.curriculum=difficulty_pool"
    first, second = (compose_job("rl", [*words, pools, "run.name=same"]) for words in (plain, spelled))
    assert first == second
    assert first.env["arithmetic"].algo == algo.EchoConfig() and first.env["reverse_text"].algo is None
    assert type(first.env["reverse_text"].curriculum).__name__ == "DifficultyPoolConfig"
    assert compose_job("rl", ["env.reverse_text.algo=null"]).env["reverse_text"].algo is None


def test_echo_roles_are_replaced_as_a_whole() -> None:
    assert compose_job("rl", ["algo=echo"]).algo.roles == {"tool": algo.EchoRoleConfig(0.1)}
    assert compose_job("rl", ["algo=echo", "algo.roles.user.alpha=1"]).algo.roles == {
        "user": algo.EchoRoleConfig(1.0)
    }


def test_optional_tables_come_with_their_defaults() -> None:
    config = compose_job("rl", ["algo.length_penalty.turns=0.5"])
    assert config.algo.length_penalty == algo.LengthPenaltyConfig(turns=0.5)
    assert compose_job("rl", []).algo.length_penalty is None


def test_output_directory_comes_from_the_environment(monkeypatch) -> None:
    monkeypatch.setenv("PRL_OUTPUT_DIR", "/data/runs")
    assert compose_job("rl", []).output_dir == "/data/runs"
    assert compose_job("rl", ["output_dir=here"]).output_dir == "here"


def test_paths_lose_their_tilde(monkeypatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert compose_job("rl", ["output_dir='~/runs'"]).output_dir == "/home/me/runs"
    assert compose_job("rl", ["ckpt.dir='~/ckpts'", "ckpt=end"]).ckpt.dir == "/home/me/ckpts"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "rl",
            ["env=[reverse_text,arithmetic]", "+algo@env.arithmetic.algo=opsd", "algo=echo", "loss=icepop"],
        ),
        ("rl", ["optim=muon", "scheduler=cosine", "tracking=none", "algo.length_penalty.turns=1"]),
        ("rl", ["algo=opd", "algo.teacher.model=tiny", "algo.teacher.headers={a: b}", "run.name='naïve'"]),
        ("sft", ["experiment=tiny_warm_start"]),
        ("export", ["run=."]),
    ],
)
def test_resolved_configs_load_as_they_were(command: str, words: list[str], tmp_path: Path) -> None:
    config = compose_job(command, words)
    resolved = tmp_path / "resolved.yaml"
    resolved.write_text(dump_resolved(command, config))
    assert load_resolved(resolved) == (command, config)


def test_jobs_and_primary_configs_are_the_same_set() -> None:
    assert {path.stem for path in CONF.glob("*.yaml")} == set(JOBS)
