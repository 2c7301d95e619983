"""Roles over the nodes of a job, and what the trainer ranks are told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launchers.nodes import nominal_gpus, place_on_nodes, rendezvous
from launchers.placement import format_table
from prl.config.compose import compose_job
from prl.config.schema import RlConfig

RESOLVED = Path("/x/configs/attempt_1/resolved.yaml")


def placed(*words: str, command: str = "rl") -> list[Any]:
    config = compose_job(command, words)
    return place_on_nodes(command, config, RESOLVED, nominal_gpus(config.cluster))


def nodes(roles: list[Any]) -> dict[str, int]:
    return {role.name: role.node for role in roles}


def test_engines_come_first_and_the_rest_follows_the_trainer() -> None:
    roles = placed("cluster=slurm", "cluster.infer_nodes=1", "cluster.train_nodes=2", "cluster.train_ranks=4")
    assert nodes(roles) == {
        "inference": 0,
        "env/reverse_text": 1,
        "orchestrator": 1,
        "trainer/0": 1,
        "trainer/1": 1,
        "trainer/2": 2,
        "trainer/3": 2,
    }
    assert all(role.devices == () for role in roles), "no GPUs were asked for"


def test_an_engine_of_several_gpus_has_them_on_its_node() -> None:
    words = ["cluster=slurm", "cluster.gpus_per_node=4", "cluster.infer_nodes=2", "cluster.infer_gpus=8"]
    config = compose_job("rl", [*words, "inference.replicas=8"])
    config.inference = SimpleNamespace(
        name="vllm", ready_timeout=1.0, replicas=4, tensor_parallel_size=2, python=None
    )
    roles = place_on_nodes("rl", config, RESOLVED, nominal_gpus(config.cluster))
    engines = [(role.node, role.devices) for role in roles if role.name.startswith("inference/")]
    assert engines == [(0, ("0", "1")), (0, ("2", "3")), (1, ("0", "1")), (1, ("2", "3"))]
    config.inference.tensor_parallel_size = 8
    with pytest.raises(ValueError, match="tensor_parallel_size = 8"):
        place_on_nodes("rl", config, RESOLVED, nominal_gpus(config.cluster))


def test_without_nodes_of_their_own_the_engines_share_the_first() -> None:
    roles = placed("cluster=slurm", "cluster.gpus_per_node=4", "cluster.train_ranks=3")
    assert set(nodes(roles).values()) == {0}
    assert {role.name: role.devices for role in roles if role.devices} == {
        "inference": ("0",),
        "trainer/0": ("1",),
        "trainer/1": ("2",),
        "trainer/2": ("3",),
    }


def test_each_node_counts_its_own_gpus() -> None:
    roles = placed(
        "cluster=slurm", "cluster.gpus_per_node=2", "cluster.train_nodes=2", "cluster.train_ranks=4",
        "cluster.infer_nodes=1",
    )  # fmt: skip
    assert [role.devices for role in roles if role.rank is not None] == [("0",), ("1",), ("0",), ("1",)]
    assert next(role for role in roles if role.name == "inference").devices == ("0",)


@pytest.mark.parametrize(
    ("option", "count", "ranks"), [("slurm_8gpu", 1, 4), ("slurm_2_2", 4, 16), ("slurm_12_4", 16, 32)]
)
def test_the_shipped_layouts_use_every_trainer_node(option: str, count: int, ranks: int) -> None:
    config = compose_job("rl", [f"cluster={option}"])
    assert config.cluster.name == "slurm" and config.cluster.nodes == count
    found = [role for role in placed(f"cluster={option}") if role.rank is not None]
    assert len(found) == ranks == config.cluster.train_ranks
    per_node = {role.node: sum(other.node == role.node for other in found) for role in found}
    first = config.cluster.infer_nodes
    assert per_node == dict.fromkeys(range(first, count), ranks // config.cluster.train_nodes)
    assert all(len({r.devices for r in found if r.node == node}) == per_node[node] for node in per_node)


def test_the_laptop_is_one_machine() -> None:
    config = compose_job("rl", ["cluster=laptop"])
    assert isinstance(config, RlConfig) and config.cluster.name == "local"


def test_ranks_are_told_where_they_meet() -> None:
    roles = placed("cluster=slurm", "cluster.infer_nodes=1", "cluster.train_nodes=2", "cluster.train_ranks=4")
    told = {role.name: role.env for role in rendezvous(roles, ["a", "b", "c"], 123_456)}
    ranks = [told[f"trainer/{rank}"] for rank in range(4)]
    assert [env["RANK"] for env in ranks] == ["0", "1", "2", "3"]
    assert [env["LOCAL_RANK"] for env in ranks] == ["0", "1", "0", "1"]
    assert {(env["WORLD_SIZE"], env["MASTER_ADDR"]) for env in ranks} == {("4", "b")}
    (port,) = {int(env["MASTER_PORT"]) for env in ranks}
    assert 20_000 <= port < 32_000 and "RANK" not in told["orchestrator"]
    other = rendezvous(roles, ["a", "b", "c"], 123_457)
    assert next(int(r.env["MASTER_PORT"]) for r in other if r.rank == 0) != port, "jobs may share a node"


def test_a_rank_with_its_own_gpu_is_local_rank_0() -> None:
    roles = placed("cluster=slurm", "cluster.gpus_per_node=2", "cluster.train_ranks=2", "inference=external",
                   "inference.base_url=http://x/v1")  # fmt: skip
    found = [role for role in rendezvous(roles, ["a"], 1) if role.rank is not None]
    assert [(role.env["LOCAL_RANK"], role.devices) for role in found] == [("0", ("0",)), ("0", ("1",))]


def test_a_placement_without_ranks_needs_no_meeting() -> None:
    roles = placed("cluster=slurm", command="eval")
    assert rendezvous(roles, ["a"], 1) == roles and nodes(roles)["eval"] == 0


def test_supervised_ranks_are_ranks_too() -> None:
    roles = placed("cluster=slurm", "cluster.train_nodes=2", "cluster.train_ranks=2", command="sft")
    assert {role.name: (role.rank, role.node) for role in roles} == {"sft/0": (0, 0), "sft/1": (1, 1)}


def test_the_table_names_nodes_only_where_there_are_several() -> None:
    roles = placed("cluster=slurm", "cluster.infer_nodes=1")
    assert format_table(roles).splitlines()[0].split()[:2] == ["node", "role"]
    alone = [replace(role, node=0) for role in roles]
    assert format_table(alone).splitlines()[0].split()[0] == "role"
