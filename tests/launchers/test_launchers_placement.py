from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from launchers.placement import COMMON_ENV, Role, assign_devices, format_table, place, visible_gpus
from prl.config.algo import EndpointConfig, GrpoConfig, OpdConfig, SftAlgoConfig
from prl.config.loss import IpoConfig
from prl.config.schema import RlConfig, SftConfig, WarmStartDataConfig
from prl.config.serving import ClusterConfig, EmbeddedConfig, ExternalConfig, TrackingConfig
from prl.config.sources import EnvConfig
from prl.config.training import AdamWConfig, ModelConfig, SchedulerConfig, TrainerConfig

RESOLVED = Path("/runs/r/configs/attempt_1/resolved.yaml")


def rl(**fields: object) -> RlConfig:
    rest = {"algo": GrpoConfig(), "env": {"a": EnvConfig(), "b": EnvConfig()}, "inference": EmbeddedConfig()}
    return RlConfig(
        loss=IpoConfig(),
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        tracking=TrackingConfig(),
        **(rest | fields),  # type: ignore[arg-type]
    )


def names(roles: list[Role]) -> list[str]:
    return [role.name for role in roles]


def by_name(roles: list[Role]) -> dict[str, Role]:
    return {role.name: role for role in roles}


def test_roles_of_an_rl_run_in_start_order() -> None:
    roles = place("rl", rl(cluster=ClusterConfig(train_ranks=2)), RESOLVED, [])
    assert names(roles) == ["inference", "env/a", "env/b", "orchestrator", "trainer/0", "trainer/1"]
    kinds = {role.name: role.kind for role in roles}
    assert [name for name, kind in kinds.items() if kind == "server"] == ["inference", "env/a", "env/b"]


def test_every_role_is_one_command_that_names_it_and_the_config() -> None:
    for role in place("rl", rl(), RESOLVED, []):
        assert role.argv == (sys.executable, "-m", "launchers.role", role.name, str(RESOLVED))


def test_an_external_engine_is_not_started() -> None:
    roles = place("rl", rl(inference=ExternalConfig(base_url="http://h/v1")), RESOLVED, [])
    assert names(roles) == ["env/a", "env/b", "orchestrator", "trainer/0"]


def test_teachers_are_served_where_no_endpoint_is_named() -> None:
    served, elsewhere = EndpointConfig(model="m"), EndpointConfig(model="m", base_url="http://t/v1")
    assert "teacher/shared" in names(place("rl", rl(algo=OpdConfig(teacher=served)), RESOLVED, []))
    assert "teacher/shared" not in names(place("rl", rl(algo=OpdConfig(teacher=elsewhere)), RESOLVED, []))
    own = {"a": EnvConfig(algo=SftAlgoConfig(teacher=served)), "b": EnvConfig()}
    assert names(place("rl", rl(env=own), RESOLVED, []))[:2] == ["inference", "teacher/a"]
    unused = {"a": EnvConfig(algo=GrpoConfig())}
    roles = place("rl", rl(algo=OpdConfig(teacher=served), env=unused), RESOLVED, [])
    assert "teacher/shared" not in names(roles), "every environment has its own algorithm"


def test_an_sft_run_has_trainers_only() -> None:
    config = SftConfig(
        data=WarmStartDataConfig(),
        optim=AdamWConfig(),
        scheduler=SchedulerConfig(),
        tracking=TrackingConfig(),
        cluster=ClusterConfig(train_ranks=2),
    )
    roles = place("sft", config, RESOLVED, ["0", "1"])
    assert names(roles) == ["sft/0", "sft/1"]
    assert [role.devices for role in roles] == [("0",), ("1",)] and {role.kind for role in roles} == {"job"}


def test_environment_of_the_roles() -> None:
    config = rl(trainer=TrainerConfig(threads=4), inference=EmbeddedConfig(threads=2))
    roles = by_name(place("rl", config, RESOLVED, ["5", "7"]))
    threads = {name: role.env["OMP_NUM_THREADS"] for name, role in roles.items()}
    assert threads == {"inference": "2", "env/a": "1", "env/b": "1", "orchestrator": "1", "trainer/0": "4"}
    assert roles["inference"].env["CUDA_VISIBLE_DEVICES"] == "5"
    assert roles["trainer/0"].env["CUDA_VISIBLE_DEVICES"] == "7"
    assert roles["orchestrator"].env["CUDA_VISIBLE_DEVICES"] == "", "a CPU role sees no GPU"
    for role in roles.values():
        assert {"TOKENIZERS_PARALLELISM", "MLFLOW_DISABLE_TELEMETRY"} <= set(role.env)


def test_hub_is_offline_only_for_weights_that_are_here(tmp_path: Path) -> None:
    def offline(path: str | None) -> set[str]:
        roles = place("rl", rl(model=ModelConfig(name="m", path=path)), RESOLVED, [])
        return {role.name for role in roles if "HF_HUB_OFFLINE" in role.env}

    assert offline(None) == offline(str(tmp_path)) == {"inference", "trainer/0"}
    assert offline("Qwen/Qwen3-0.6B") == set()


def test_servers_have_time_to_come_up() -> None:
    config = rl(inference=EmbeddedConfig(ready_timeout=11), cluster=ClusterConfig(start_timeout=22))
    roles = by_name(place("rl", config, RESOLVED, []))
    assert roles["inference"].ready_timeout == 11 and roles["env/a"].ready_timeout == 22
    assert roles["trainer/0"].ready_timeout is None


def test_engines_first_then_trainers() -> None:
    wants = ["engine", "engine", None, None, "trainer", "trainer"]
    assert assign_devices(wants, ["3", "4", "5", "6", "7"]) == [("3",), ("4",), (), (), ("5",), ("6",)]
    assert assign_devices(wants, []) == [()] * 6


def test_with_few_gpus_engines_share_those_of_the_trainers() -> None:
    assert assign_devices(["engine", None, "trainer"], ["0"]) == [("0",), (), ("0",)]
    wants = ["engine", "engine", "engine", "trainer", "trainer"]
    assert assign_devices(wants, ["0", "1"]) == [("0",), ("1",), ("0",), ("0",), ("1",)]


def test_fewer_gpus_than_trainer_ranks_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"cluster.train_ranks = 2: .*CUDA_VISIBLE_DEVICES="):
        assign_devices(["trainer", "trainer"], ["0"])


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        ("0,2", ["0", "2"]),
        ("", []),
        ("-1", []),
        ("1,-1,2", ["1"]),
        (" GPU-a , MIG-b ", ["GPU-a", "MIG-b"]),
        ("none", []),
    ],
)
def test_visible_gpus_as_cuda_reads_them(listed: str, expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, tmp_path) == expected


def test_visible_gpus_without_a_variable_are_the_device_files(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"], "CUDA counts what it finds from 0"
    assert visible_gpus({}, tmp_path / "nowhere") == []


def test_table_shows_what_is_special() -> None:
    table = format_table(place("rl", rl(trainer=TrainerConfig(threads=3)), RESOLVED, ["0", "1"]))
    head, *lines = table.splitlines()
    assert head.split() == ["role", "kind", "devices", "environment"]
    rows = {line.split()[0]: line for line in lines}
    assert rows["trainer/0"].split()[1:] == ["job", "1", "HF_HUB_OFFLINE=1", "OMP_NUM_THREADS=3"]
    assert rows["orchestrator"].split()[1:] == ["job", "cpu"]
    assert not any(key in table for key in COMMON_ENV if key != "OMP_NUM_THREADS")


def test_placing_imports_nothing_heavy() -> None:
    heavy = ("torch", "mlflow", "numpy", "transformers", "verifiers", "hydra", "rich")
    code = f"import sys, launchers.run, launchers.role; print([m for m in {heavy} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "[]\n"
