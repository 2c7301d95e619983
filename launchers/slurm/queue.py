"""What SLURM says about jobs. Without accounting (`sacct`) the controller's own memory answers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable

ASK_SECONDS = 30.0
ENDED = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED",
    "REVOKED", "TIMEOUT",
}  # fmt: skip
UNKNOWN = "UNKNOWN"


def ask(*words: str) -> str | None:
    """Output of one of SLURM's commands; None when it failed or did not answer."""
    try:
        told = subprocess.run(words, capture_output=True, text=True, timeout=ASK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout if told.returncode == 0 else None


def active(job: str) -> dict[str, str] | None:
    """State of each element of `job` that waits or runs, by its id; None when SLURM cannot tell now.

    A job that SLURM has forgotten is not active.
    """
    out = ask("squeue", "--noheader", "--array", "--jobs", job, "--format", "%i|%T")
    if out is None:
        return {} if ask("squeue", "--noheader", "--format", "%i") is not None else None
    rows = (line.strip().partition("|") for line in out.splitlines() if "|" in line)
    return {name: state for name, _, state in rows if state not in ENDED}


def ended_as(jobs: Iterable[str]) -> dict[str, str]:
    """Last known state of each job (`COMPLETED`, `FAILED`, ...); `UNKNOWN` where nobody remembers."""
    jobs = list(jobs)
    known = _from_sacct(jobs) or {}
    return {job: known.get(job) or _from_controller(job) for job in jobs}


def cancel(jobs: Iterable[str]) -> None:
    """End jobs that wait or run."""
    subprocess.run(["scancel", *jobs], check=False, capture_output=True, timeout=ASK_SECONDS)


def requeue(job: str) -> bool:
    """Ask SLURM to start a running job again; whether it agreed."""
    return ask("scontrol", "requeue", job) is not None


def _from_sacct(jobs: list[str]) -> dict[str, str] | None:
    out = ask("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(jobs))
    if out is None:
        return None
    rows = (line.split("|") for line in out.splitlines() if "|" in line)
    return {row[0]: row[1].split()[0] for row in rows if row[1].strip()}


def _from_controller(job: str) -> str:
    out = ask("scontrol", "--oneliner", "show", "job", job) or ""
    found = re.search(r"\bJobState=(\S+)", out)
    return found.group(1) if found else UNKNOWN
