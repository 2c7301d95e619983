"""Schema of `cluster=slurm`: one SLURM job is one run, every task of it executes the same placement."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prl.config.fields import opt
from prl.config.serving import ClusterConfig

MINUTES_PER_DAY = 24 * 60
LONGEST_WARNING = 120
"""Seconds between SLURM's warning and the time limit, where the limit is long enough."""


@dataclass
class SlurmConfig(ClusterConfig):
    """Submit the run as one SLURM job, of one node or of many; a sweep as one array of such jobs."""

    name: str = "slurm"
    train_nodes: int = opt(1, "Nodes of the trainer; they follow those of the engines.", ge=1)
    infer_nodes: int = opt(0, "Nodes of the engines; 0 = they live on the first trainer node.", ge=0)
    gpus_per_node: int | None = opt(None, "GPUs asked for on each node; null = none.", ge=1)
    partition: str | None = opt(None, "Partition; null = the cluster's default.")
    account: str | None = opt(None, "Account that pays.")
    qos: str | None = opt(None, "Quality of service.")
    time: str = opt("24:00:00", "Time limit: minutes, HH:MM:SS or D-HH:MM:SS.")
    gres: str | None = opt(
        None, "Generic resources of each node, e.g. gpu:h100:8; instead of --gpus-per-node."
    )
    cpus_per_task: int | None = opt(None, "CPUs on each node; null = the cluster's default.", ge=1)
    mem_gb: float | None = opt(None, "Memory on each node, GB; null = the cluster's default.", gt=0)
    constraint: str | None = opt(None, "Features that the nodes must have.")
    nodelist: str | None = opt(None, "Nodes that must be used.")
    exclude: str | None = opt(None, "Nodes that must not be used.")
    exclusive: bool = opt(False, "Share the nodes with no other job.")
    job_name: str | None = opt(None, "Name of the job; null = run.name, in a sweep the sweep's.")
    activate: str | None = opt(
        None, "Shell line that activates the environment, the first one of the script."
    )
    setup: list[str] = opt(factory=list, doc="Shell lines of the script, before the processes start.")
    pre_run: str | None = opt(None, "Shell line that runs last before the processes start.")
    python: str | None = opt(None, "Interpreter on the nodes; null = the one that runs this command.")
    srun_args: list[str] = opt(factory=list, doc="Further arguments of srun.")
    extra: dict[str, Any] = opt(factory=dict, doc="Further sbatch parameters, e.g. {mail-type: END}.")
    wait: bool = opt(False, "Stay until the job has ended, and leave with its status.")
    poll_seconds: float = opt(5.0, "Seconds between two looks at a job that is waited for.", gt=0)
    array_parallelism: int = opt(256, "Elements of a sweep that run at the same time.", ge=1)
    signal_delay: int | None = opt(
        None,
        "Seconds before the time limit at which a checkpoint is made and the job requeued; null = 120, or a "
        "quarter of a shorter limit.",
        ge=1,
    )
    max_requeues: int = opt(3, "Times that a preempted or timed-out job goes on by itself.", ge=0)
    step_timeout: float | None = opt(
        7200.0, "Seconds after which a trainer that makes no step is ended; null = never.", gt=0
    )
    failure_grace: float = opt(0.0, "Seconds that a failed job keeps its nodes, to be looked at.", ge=0)

    @property
    def nodes(self) -> int:
        return self.infer_nodes + self.train_nodes


def minutes_of(limit: str) -> int | None:
    """A time limit in whole minutes, rounded up; None when it is malformed or no time at all.

    As in sbatch: MM, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+(?::\d{1,2}){0,2})", limit.strip())
    if match is None:
        return None
    days, parts = match.group(1), [int(part) for part in match.group(2).split(":")]
    if any(part > 59 for part in parts[1:]):
        return None
    if days is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    else:
        hours, minutes, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
    whole = int(days or 0) * MINUTES_PER_DAY + hours * 60 + minutes + (seconds > 0)
    return whole or None


def warning_seconds(cluster: SlurmConfig) -> int:
    """Seconds before the time limit at which SLURM warns the job."""
    if cluster.signal_delay is not None:
        return cluster.signal_delay
    minutes = minutes_of(cluster.time)
    assert minutes is not None, cluster.time
    return min(LONGEST_WARNING, minutes * 60 // 4)
