"""Rules of `cluster`: what can be judged without asking the cluster itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from prl.config.cluster import SlurmConfig, minutes_of
from prl.config.errors import Problem
from prl.inference.roles import replicas

OWN_PARAMETERS = {
    "array": "the sweep",
    "error": "the run directory",
    "nodes": "cluster.train_nodes and cluster.infer_nodes",
    "ntasks": "one task a node",
    "ntasks-per-node": "one task a node",
    "open-mode": "the run directory",
    "output": "the run directory",
    "requeue": "cluster.max_requeues",
    "no-requeue": "cluster.max_requeues",
    "signal": "cluster.signal_delay",
    "partition": "cluster.partition",
    "account": "cluster.account",
    "qos": "cluster.qos",
    "time": "cluster.time",
    "gres": "cluster.gres",
    "gpus-per-node": "cluster.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_task",
    "mem": "cluster.mem_gb",
    "constraint": "cluster.constraint",
    "nodelist": "cluster.nodelist",
    "exclude": "cluster.exclude",
    "exclusive": "cluster.exclusive",
    "job-name": "cluster.job_name",
}
"""sbatch parameter -> what sets it already."""

NO_ENGINES = ("sft", "export")
ONE_NODE = ("eval", "export", "inference")


def time_limit_is_readable(config: Any) -> Iterator[Problem]:
    cluster = config.cluster
    if isinstance(cluster, SlurmConfig) and minutes_of(cluster.time) is None:
        reason, remedy = (
            "not a time limit",
            "Write minutes, HH:MM:SS or D-HH:MM:SS, e.g. cluster.time=04:00:00.",
        )
        yield Problem("cluster.time", cluster.time, reason, remedy)


def warning_leaves_time(config: Any) -> Iterator[Problem]:
    cluster = config.cluster
    if not isinstance(cluster, SlurmConfig) or cluster.signal_delay is None:
        return
    minutes = minutes_of(cluster.time)
    if minutes is not None and cluster.signal_delay > minutes * 30:
        reason = f"more than half of cluster.time = {cluster.time}"
        remedy = "Leave it out: it is then a quarter of a short limit."
        yield Problem("cluster.signal_delay", cluster.signal_delay, reason, remedy, ("cluster.time",))


def ranks_fit_the_nodes(config: Any) -> Iterator[Problem]:
    cluster = config.cluster
    if not isinstance(cluster, SlurmConfig):
        return
    ranks, nodes, gpus = cluster.train_ranks, cluster.train_nodes, cluster.gpus_per_node
    if ranks % nodes:
        reason = f"{ranks} ranks cannot be spread evenly over cluster.train_nodes = {nodes}"
        remedy = f"Nearest: {-(-ranks // nodes) * nodes}."
        yield Problem("cluster.train_ranks", ranks, reason, remedy, ("cluster.train_nodes",))
    elif gpus is not None and ranks // nodes > gpus:
        reason = f"{ranks // nodes} on each trainer node, which has cluster.gpus_per_node = {gpus}"
        remedy = f"With {nodes} node{'s' * (nodes > 1)} at most {nodes * gpus}; or raise cluster.train_nodes."
        yield Problem("cluster.train_ranks", ranks, reason, remedy, ("cluster.gpus_per_node",))
    engines = cluster.infer_gpus
    room = None if gpus is None else max(1, cluster.infer_nodes) * gpus
    if engines is not None and room is not None and engines > room:
        where = f"{max(1, cluster.infer_nodes)} node(s) of {gpus} GPUs hold {room}"
        involves = ("cluster.infer_nodes", "cluster.gpus_per_node")
        yield Problem("cluster.infer_gpus", engines, where, "Raise cluster.infer_nodes.", involves)


def gpus_are_asked_for_once(config: Any) -> Iterator[Problem]:
    cluster = config.cluster
    if not isinstance(cluster, SlurmConfig) or cluster.gres is None:
        return
    count = re.fullmatch(r"gpu(?::[\w.-]*[A-Za-z][\w.-]*)?:(\d+)", cluster.gres)
    if count and cluster.gpus_per_node is None:
        reason = "prl must know how many GPUs a node gives"
        remedy = f"Add cluster.gpus_per_node={count.group(1)}."
        yield Problem("cluster.gres", cluster.gres, reason, remedy, ("cluster.gpus_per_node",))
    elif count and int(count.group(1)) != cluster.gpus_per_node:
        reason = f"cluster.gpus_per_node = {cluster.gpus_per_node}"
        yield Problem("cluster.gres", cluster.gres, reason, "Make them agree.", ("cluster.gpus_per_node",))


def extra_parameters_are_free(config: Any) -> Iterator[Problem]:
    if not isinstance(config.cluster, SlurmConfig):
        return
    for key, value in config.cluster.extra.items():
        owner = OWN_PARAMETERS.get(key.replace("_", "-"))
        if owner:
            yield Problem(f"cluster.extra.{key}", value, f"set by {owner}", "Remove it.")
        elif value is None or value is False:
            yield Problem(f"cluster.extra.{key}", value, "sbatch has no such value", "Leave it out.")
    for index, argument in enumerate(config.cluster.srun_args):
        if re.match(r"--(kill-on-bad-exit|wait|output|error|ntasks|open-mode)\b", argument):
            yield Problem(f"cluster.srun_args[{index}]", argument, "set by prl", "Remove it.")


def nodes_have_work(command: str) -> Any:
    """The rule of one command: every node that is asked for has something to do."""

    def rule(config: Any) -> Iterator[Problem]:
        cluster = config.cluster
        if not isinstance(cluster, SlurmConfig):
            return
        idle = command in (*NO_ENGINES, *ONE_NODE) or getattr(config.inference, "name", "") == "external"
        if cluster.infer_nodes and idle:
            reason = "this command starts no engines on nodes of their own"
            yield Problem("cluster.infer_nodes", cluster.infer_nodes, reason, "Set cluster.infer_nodes=0.")
        elif cluster.infer_nodes > (engines := replicas(config) if cluster.infer_nodes else 0):
            reason = f"only {engines} engine{'s' * (engines != 1)} to place on them"
            remedy = "Raise cluster.infer_gpus, or inference.replicas where there are no GPUs."
            involves = ("cluster.infer_gpus", "inference.replicas")
            yield Problem("cluster.infer_nodes", cluster.infer_nodes, reason, remedy, involves)
        if cluster.train_nodes > 1 and command in ONE_NODE:
            reason = f"`prl {command}` runs on one node"
            yield Problem("cluster.train_nodes", cluster.train_nodes, reason, "Set cluster.train_nodes=1.")

    return rule


RULES = [
    time_limit_is_readable,
    warning_leaves_time,
    ranks_fit_the_nodes,
    gpus_are_asked_for_once,
    extra_parameters_are_free,
]


def rules_of(command: str) -> list[Any]:
    """Every rule of `cluster` for one command."""
    return [*RULES, nodes_have_work(command)]
