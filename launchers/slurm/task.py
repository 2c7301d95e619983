"""One task of a SLURM job: the site of a launch on one of the job's nodes.

The task on node 0 leads: it opens the run directory, tracks, and tells. Every task runs the roles of its own
node and watches them; the tasks know of each other through small files below `configs/attempt_n/nodes`.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launchers import placement
from launchers.interrupts import Interrupts
from launchers.local import Outcome, supervise
from launchers.nodes import nominal_gpus, place_on_nodes, rendezvous
from launchers.placement import Role
from launchers.run_directory import RunPlan, plan_again
from launchers.site import Planner, Site
from launchers.slurm.network import address_towards, interface_of
from launchers.slurm.peers import Follower, Leader, NodeFiles
from launchers.slurm.queue import requeue
from prl.config.load import load_resolved
from prl.run_dir import BIND_VAR, POLL_SECONDS, RunDir, write_atomic

log = logging.getLogger(__name__)

REQUEUED = 75
"""Exit code of a launch that goes on in the job's next start (EX_TEMPFAIL)."""
KILL_SECONDS = 60.0
LOCK_SECONDS = 120.0
"""A file server keeps the lock of a lost node until its lease has run out (NFS: 90 s)."""


@dataclass(frozen=True)
class Allocation:
    """The job as this task sees it. `job` is its name (`123` or `123_4`), `number` SLURM's own number."""

    job: str
    number: int
    node: int
    hosts: tuple[str, ...]
    restarts: int = 0

    @classmethod
    def from_environment(cls) -> Allocation:
        from submitit import JobEnvironment

        env = JobEnvironment()
        restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        return cls(env.job_id, int(env.raw_job_id), env.node, tuple(env.hostnames), restarts)


class Task(Site):
    """The launch of one run in `allocation`. Signals are noted from the moment it is made."""

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation
        self.leads = allocation.node == 0
        self._interrupts = Interrupts(warning=True)
        self._interrupts.__enter__()
        self._leader: Leader | None = None
        self._config: Any = None

    @classmethod
    def from_environment(cls) -> Task:
        return cls(Allocation.from_environment())

    def interrupts(self) -> Interrupts:
        return self._interrupts

    def plan(self, config: Any, planner: Planner) -> RunPlan:
        """A later start goes on with the run of the first one, also after a loss that nobody warned of."""
        restarts, limit = self.allocation.restarts, config.cluster.max_requeues
        if restarts == 0:
            return planner(config)
        if restarts > limit:
            raise ValueError(f"cluster.max_requeues = {limit}: used up by start {restarts} of this job")
        return replace(plan_again(config, planner), patience=LOCK_SECONDS)

    def roles(self, command: str, config: Any, run: RunDir) -> list[Role]:
        allocation, gpus = self.allocation, nominal_gpus(config.cluster)
        if config.cluster.gpus_per_node:
            gpus[allocation.node] = placement.visible_gpus(os.environ)
        roles = place_on_nodes(command, config, run.resolved_config, gpus)
        roles = rendezvous(roles, allocation.hosts, allocation.number)
        return [self._on_network(role) if role.node == allocation.node else role for role in roles]

    def supervise(
        self,
        roles: list[Role],
        run: RunDir,
        config: Any,
        interrupts: Interrupts,
        on_end: Callable[[], None] = lambda: None,
    ) -> Outcome:
        self._config = config
        files = NodeFiles(run)
        mine = [role for role in roles if role.node == 0]
        others = {role.node for role in roles if role.kind == "job"} - {0}
        stoppable = hasattr(config, "ckpt")
        leader = self._leader = Leader(files, config.cluster, interrupts, others, run, stoppable)
        outcome = Outcome(1, "FAILED", "the leading task itself failed")
        write_atomic(self._meeting(run.path), json.dumps({"attempt": run.attempt}))
        try:
            outcome = supervise(mine, run, config.cluster.grace, interrupts, on_end, leader)
        finally:
            files.tell_end(outcome)
        return outcome

    def follow(self, path: Path, seconds: float) -> int:
        """Wait for the leading task to open an attempt, then run the roles of this node to its end."""
        run = self._meet(path, seconds)
        command, config = load_resolved(run.resolved_config)
        node = self.allocation.node
        mine = [role for role in self.roles(command, config, run) if role.node == node]
        print(f"node {node} ({self.allocation.hosts[node]}): {', '.join(r.name for r in mine)}", flush=True)
        follower = Follower(NodeFiles(run), node)
        outcome = supervise(mine, run, config.cluster.grace, self._interrupts, peers=follower)
        print(f"node {node}: {outcome.status} {outcome.reason}", flush=True)
        if outcome.status == "FAILED":
            follower.tell_failure(outcome, patience=config.cluster.grace + KILL_SECONDS)
        code = follower.exit_code(outcome)
        if code and outcome.status == "FAILED":
            time.sleep(config.cluster.failure_grace)
        return code

    def close(self, outcome: Outcome) -> int:
        """Requeue a job that was warned and stopped; hold the nodes of one that failed, where asked."""
        if self._leader is not None and self._leader.stopped:
            return self._requeue(self._config.cluster.max_requeues)
        if outcome.status == "FAILED" and self._config is not None:
            time.sleep(self._config.cluster.failure_grace)
        return outcome.code

    def _requeue(self, limit: int) -> int:
        allocation = self.allocation
        if allocation.restarts >= limit:
            print(f"not requeued: cluster.max_requeues = {limit} is used up", flush=True)
            return 1
        print(f"requeueing job {allocation.job}: start {allocation.restarts + 2} follows", flush=True)
        if not requeue(allocation.job):
            print(f"SLURM refused to requeue job {allocation.job}", flush=True)
            return 1
        deadline = time.monotonic() + KILL_SECONDS
        while self._interrupts.signum is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return REQUEUED

    def _meeting(self, path: Path) -> Path:
        """Where the leading task tells the others which attempt this start of the job is."""
        return path / "slurm" / f"start_{self.allocation.job}_{self.allocation.restarts}.json"

    def _meet(self, path: Path, seconds: float) -> RunDir:
        meeting, deadline = self._meeting(path), time.monotonic() + seconds
        while not meeting.exists():
            if self._interrupts.signum is not None:
                raise SystemExit(128 + self._interrupts.signum)
            if time.monotonic() > deadline:
                raise TimeoutError(f"node 0 opened no run within {seconds:.0f} s: no {meeting}")
            time.sleep(POLL_SECONDS)
        return RunDir(path, json.loads(meeting.read_text())["attempt"])

    def _on_network(self, role: Role) -> Role:
        """In a job of several nodes servers bind the address that the other nodes reach."""
        hosts = self.allocation.hosts
        if len(hosts) == 1:
            return role
        address = address_towards(hosts[1 if self.allocation.node == 0 else 0])
        extra = {BIND_VAR: address}
        if interface := interface_of(address):
            names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
            extra |= {name: os.environ.get(name, interface) for name in names}
        return replace(role, env={**role.env, **extra})
