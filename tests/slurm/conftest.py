"""A real SLURM cluster of three nodes with fake GPUs on this machine, for the tests of this folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent / "cluster"
ROOT = Path(__file__).parents[2]
NEEDED = ("slurmctld", "slurmd", "munged", "ip", "nsenter")
PACKAGES = "slurmctld slurmd slurm-client munge iproute2 util-linux"
OF_A_TRAINER = ("GLOO_SOCKET_IFNAME", "LOCAL_RANK")
"""Set by the trainers of other tests of this process for themselves; a job would inherit them."""
PATIENCE = 420.0
"""Seconds that any one job may take on a machine on which everything else runs too."""


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """Environment variables of the cluster's clients; the cluster is brought up once and taken down
    again, unless it was up before."""
    path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"])
    missing = [tool for tool in NEEDED if shutil.which(tool, path=path) is None]
    why = f"no {', '.join(missing)}: apt-get install {PACKAGES}" if missing else ""
    if not missing and os.geteuid() != 0:
        why = "the test cluster needs root for its network namespaces"
    if why and os.environ.get("REQUIRE_SLURM"):
        pytest.fail(why)
    if why:
        pytest.skip(why)
    env = {key: value for key, value in os.environ.items() if key not in OF_A_TRAINER} | {"PATH": path}
    start = [str(HERE / "start_slurm.sh"), "--nodes", "3", "--gpus", "8", "--isolate", "ns"]
    told = subprocess.run(start, env=env, capture_output=True, text=True, timeout=120, check=False)
    found_up = "is up already" in told.stdout
    try:
        assert told.returncode == 0, told.stdout + told.stderr
        script = f"{told.stdout.splitlines()[-1]} && env -0"
        listing = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
        yield dict(line.split("=", 1) for line in listing.stdout.split("\0") if "=" in line)
    finally:
        if not found_up:
            subprocess.run(
                [str(HERE / "stop_slurm.sh")], env=env, capture_output=True, timeout=120, check=False
            )


@dataclass
class Cluster:
    """The cluster as a user sees it from `place`, the shared directory in which commands are given."""

    env: dict[str, str]
    place: Path

    def prl(self, *words: str, timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        return self.run([sys.executable, "-m", "prl", *words], timeout)

    def run(self, words: list[str], timeout: float = PATIENCE) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.place,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    @property
    def environment(self) -> dict[str, str]:
        own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        dropped = ("PRL_OUTPUT_DIR", "CUDA_VISIBLE_DEVICES")
        return {key: value for key, value in self.env.items() if key not in dropped} | own

    def queue(self, job: str) -> str:
        """States of what is left of a job; empty when nothing is."""
        return self.run(["squeue", "--noheader", "--array", "-j", job, "-o", "%T"]).stdout.strip()

    def state(self, job: str) -> str:
        out = self.run(["sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", job]).stdout.split()
        return " ".join(out).partition("|")[2]

    def wait(self, condition: Callable[[], bool], timeout: float = PATIENCE) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.1)

    def ended(self, job: str) -> str:
        """Wait until a job is over; its state."""
        self.wait(lambda: not self.queue(job))
        return self.state(job)

    def processes(self, mark: str) -> list[psutil.Process]:
        """Live processes of the whole machine, on every node, whose command line or directory has `mark`."""
        return [process for process in psutil.process_iter() if _has(process, mark)]


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
            return False
        return any(mark in word for word in process.cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def cluster(slurm: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    """The cluster with an empty shared directory; whatever a test left in the queue is cancelled."""
    found = Cluster(slurm, tmp_path)
    yield found
    left = found.run(["squeue", "--noheader", "-o", "%A"]).stdout.split()
    if left:
        found.run(["scancel", *left])
        found.wait(lambda: not found.run(["squeue", "--noheader"]).stdout.strip(), 60)


@pytest.fixture
def node(cluster: Cluster) -> Iterator[Callable[[str, str], None]]:
    """`node("down", "n2")` cuts its power: no process of it is left, no packet leaves it. SLURM is told
    at once, what it finds out by itself after SlurmdTimeout. All nodes are up again afterwards."""
    lost: list[str] = []

    def change(what: str, name: str) -> None:
        subprocess.run(["ip", "link", "set", f"slv{name[1:]}", what], env=cluster.env, check=True)
        subprocess.run([str(HERE / "node_slurm.sh"), what, name], env=cluster.env, check=True)
        state = {"down": "down", "up": "resume"}[what]
        cluster.run(["scontrol", "update", f"nodename={name}", f"state={state}", "reason=test"])
        lost.append(name) if what == "down" else lost.remove(name)

    yield change
    for name in list(lost):
        change("up", name)
    cluster.wait(
        lambda: (
            cluster.run(["sinfo", "-h", "-p", "main", "-t", "idle,mix,alloc", "-o", "%D"]).stdout.strip()
            == "3"
        )
    )


@pytest.fixture
def submitted() -> Callable[[subprocess.CompletedProcess[str]], str]:
    """The job id that a command told."""

    def job_of(told: subprocess.CompletedProcess[str]) -> str:
        assert told.returncode == 0, told.stdout + told.stderr
        lines = [line for line in told.stdout.splitlines() if line.startswith("submitted ")]
        return lines[0].split("job ")[1].split()[0]

    return job_of
