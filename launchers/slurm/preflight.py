"""What only the cluster can refuse, asked before anything is submitted: all faults at once, with remedies."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from launchers.slurm.queue import ASK_SECONDS, ask
from prl.config.cluster import SlurmConfig
from prl.config.errors import NO_VALUE, ConfigErrors, Problem, suggest

TOOLS = ("sbatch", "srun", "squeue", "scontrol", "scancel")


def refuse(
    cluster: SlurmConfig, directory: Path, script: str, elements: int = 1, key: str = "output_dir"
) -> None:
    """Raises ConfigErrors when the cluster could not run this job, or the directory not take it.

    `key`: what sets the directory.
    """
    problems = list(_problems(cluster, directory, elements, key))
    if not problems:
        problems = list(_test(script))
    if problems:
        raise ConfigErrors(problems)


@contextlib.contextmanager
def told_by_sbatch() -> Iterator[None]:
    """What sbatch refuses although it had no objection before, as ConfigErrors: a limit of the account."""
    from submitit.core.utils import FailedJobError

    try:
        yield
    except FailedJobError as error:
        raise ConfigErrors([_refusal(str(error))]) from None


def _problems(cluster: SlurmConfig, directory: Path, elements: int, key: str) -> Iterator[Problem]:
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        remedy = "Submit from a login node, or choose cluster=local; dry_run=true works everywhere."
        yield Problem("cluster", "slurm", f"{', '.join(missing)} not found on this machine", remedy)
        return
    if fault := _unwritable(directory):
        remedy = "Every node must be able to write there: choose a directory on the shared file system."
        yield Problem(key, directory, fault, remedy)
    yield from partition_is_known(cluster, ask("sinfo", "--noheader", "--format", "%R") or "")
    yield from gpus_are_there(cluster, ask("sinfo", "--noheader", "--format", "%R|%G") or "")
    yield from array_fits(elements, ask("scontrol", "show", "config") or "")


def partition_is_known(cluster: SlurmConfig, listing: str) -> Iterator[Problem]:
    """`listing`: names of the partitions, one a line; empty when SLURM did not answer."""
    names = sorted(set(listing.split()))
    if cluster.partition is None or not names:
        return
    for name in cluster.partition.split(","):
        if name not in names:
            yield Problem("cluster.partition", name, "no such partition", suggest(name, names))


def gpus_are_there(cluster: SlurmConfig, listing: str) -> Iterator[Problem]:
    """`listing`: `partition|generic resources` of each kind of node, one a line."""
    if cluster.gpus_per_node is None or not listing.strip():
        return
    wanted = cluster.partition.split(",") if cluster.partition else None
    rows = [line.strip().partition("|") for line in listing.splitlines()]
    counts = [_gpus_of(resources) for name, _, resources in rows if wanted is None or name in wanted]
    most = max(counts, default=0)
    if counts and cluster.gpus_per_node > most:
        where = f"partition {cluster.partition}" if cluster.partition else "the cluster"
        reason = f"the nodes of {where} have at most {most}"
        remedy = "Lower it, or spread the run over more nodes by cluster.train_nodes and cluster.infer_nodes."
        yield Problem("cluster.gpus_per_node", cluster.gpus_per_node, reason, remedy)


def array_fits(elements: int, config: str) -> Iterator[Problem]:
    """`config`: what `scontrol show config` prints. The largest index of an array is one below its size."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if found and elements > int(found.group(1)):
        reason = f"{elements} elements, this cluster takes arrays of {found.group(1)} (MaxArraySize)"
        yield Problem("--multirun", NO_VALUE, reason, "Split the sweep, e.g. by one seed a command.")


def _gpus_of(resources: str) -> int:
    """GPUs in `gpu:a100:8(S:0-1),shard:16`."""
    found = re.findall(r"\bgpu(?::[^:,(]+)?:(\d+)", resources)
    return sum(int(count) for count in found)


def _unwritable(directory: Path) -> str | None:
    """Why `directory`, which need not exist, cannot be written to; None when it can."""
    place = directory
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        return f"{place} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return f"{place} cannot be written to ({error.strerror or type(error).__name__})"


def _test(script: str) -> Iterator[Problem]:
    """What sbatch itself would say, without submitting."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(script)
        file.flush()
        try:
            told = subprocess.run(
                ["sbatch", "--test-only", file.name],
                capture_output=True,
                text=True,
                timeout=ASK_SECONDS,
                check=False,
                env={**os.environ, "SLURM_TIME_FORMAT": "standard"},
            )
        except subprocess.TimeoutExpired:
            yield Problem("cluster", "slurm", f"sbatch did not answer within {ASK_SECONDS:.0f} s")
            return
    if told.returncode:
        yield _refusal(told.stderr)


def _refusal(text: str) -> Problem:
    lines = [line.removeprefix("sbatch: error: ").strip() for line in text.splitlines()]
    said = "; ".join(line.removeprefix("allocation failure: ") for line in lines if line)
    return Problem("cluster", "slurm", f"sbatch refuses the job: {said}", "See the script by dry_run=true.")
