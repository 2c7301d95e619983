"""The placement over the nodes of one job: which node runs which role, on which of its GPUs.

Nodes in order: engines first (`cluster.infer_nodes`), then trainers (`cluster.train_nodes`). Orchestrator,
environments and whatever else has no device of its own live on the first trainer node. Pure, like
`launchers.placement`: a dry run prints the table, every task of the job executes its part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from launchers.placement import PARTS, Part, Role, assign_devices, with_variables
from prl.config.cluster import SlurmConfig

FIRST_PORT, PORTS = 20_000, 12_000
"""Below the range from which the system lends ports to whoever asks for any."""


def place_on_nodes(
    command: str, config: Any, resolved: Path, gpus: Mapping[int, Sequence[str]]
) -> list[Role]:
    """The roles of all nodes in start order, each with its node. `gpus`: CUDA ids by node.

    Raises ValueError when a node has GPUs, but fewer than its trainer ranks or than one of its engines needs.
    """
    cluster: SlurmConfig = config.cluster
    parts = list(PARTS[command](config))
    nodes = _nodes_of(parts, cluster)
    devices: dict[int, tuple[str, ...]] = {}
    for node in sorted(set(nodes)):
        members = [index for index, where in enumerate(nodes) if where == node]
        wants, sizes = [parts[index].wants for index in members], [parts[index].gpus for index in members]
        found = assign_devices(wants, list(gpus.get(node, ())), sizes)
        devices.update(zip(members, found, strict=True))
    roles = [
        replace(part.role(resolved, devices[index]), node=nodes[index]) for index, part in enumerate(parts)
    ]
    return with_variables(roles, config)


def nominal_gpus(cluster: SlurmConfig) -> dict[int, list[str]]:
    """CUDA ids of each node as the job asks for them; a task then has those that SLURM gave it."""
    ids = [str(index) for index in range(cluster.gpus_per_node or 0)]
    return dict.fromkeys(range(cluster.nodes), ids)


def rendezvous(roles: Sequence[Role], hosts: Sequence[str], job: int) -> list[Role]:
    """`roles` with what torch.distributed needs in the environment of every trainer rank.

    `hosts`: names of the job's nodes by node. `job`: SLURM's own number of this job, which gives the port:
    jobs that share a node must not share it.
    """
    ranks = [role for role in roles if role.rank is not None]
    if not ranks:
        return list(roles)
    common = {
        "WORLD_SIZE": str(len(ranks)),
        "MASTER_ADDR": hosts[ranks[0].node],
        "MASTER_PORT": str(FIRST_PORT + job % PORTS),
    }
    return [role if role.rank is None else _with_rank(role, ranks, common) for role in roles]


def _with_rank(role: Role, ranks: Sequence[Role], common: Mapping[str, str]) -> Role:
    on_node = [other.rank for other in ranks if other.node == role.node]
    # Each rank sees its own GPU only, so that it is device 0 to it.
    local = "0" if role.devices else str(on_node.index(role.rank))
    return replace(role, env={**role.env, **common, "RANK": str(role.rank), "LOCAL_RANK": local})


def _nodes_of(parts: Sequence[Part], cluster: SlurmConfig) -> list[int]:
    """Node of each part. Engines fill the engine nodes in order and evenly, ranks the trainer nodes."""
    engines = [index for index, part in enumerate(parts) if part.wants == "engine"]
    trainers = [index for index, part in enumerate(parts) if part.wants == "trainer"]
    first_trainer, engine_nodes = cluster.infer_nodes, max(1, cluster.infer_nodes)
    nodes = [first_trainer] * len(parts)
    for order, index in enumerate(engines):
        nodes[index] = order * engine_nodes // max(len(engines), engine_nodes)
    for order, index in enumerate(trainers):
        nodes[index] = first_trainer + order * cluster.train_nodes // len(trainers)
    for index, part in enumerate(parts):
        if part.wants is None and part.name == "inference":  # the router in front of the engines
            nodes[index] = 0
    return nodes
