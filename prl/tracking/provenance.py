"""What a run was made of, as text: commit, uncommitted changes, packages, the batch script."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from prl.run_dir import RunDir
from prl.tracking.secrets import redact_text

DIFF_BYTES = 1_000_000
SHORTEST_SECRET = 16
BATCH_SCRIPTS = ("*.sbatch", "launcher/*.sbatch", "slurm/*.sh", "slurm/*.sbatch")


def attempt_files(run: RunDir, directory: Path | None = None) -> dict[str, str]:
    """Name -> text of what an attempt at `run` leaves beside its config. What is not there has no entry."""
    files = {"environment.txt": environment_freeze(), "git.diff": git_diff(directory)}
    files |= {script.name: redact_text(script.read_text()) for script in batch_scripts(run)}
    return {name: text for name, text in files.items() if text}


def code_directory() -> Path:
    """The checkout that a run is of: that of the current directory, else prl's own, if it is in one."""
    here, own = Path.cwd(), Path(__file__).resolve().parent
    return here if git_commit(here) or not git_commit(own) else own


def git_commit(directory: Path | None = None) -> str | None:
    """Commit of `directory` (None: the current one); None outside a repository."""
    return _git(directory, "rev-parse", "HEAD")


def git_diff(directory: Path | None = None) -> str:
    """What differs from the commit, staged or not, with the names of files that git does not know."""
    changed = _git(directory, "diff", "HEAD")
    unknown = _git(directory, "ls-files", "--others", "--exclude-standard")
    text = changed + "\n" if changed else ""
    if unknown:
        text += "".join(f"# not in git: {name}\n" for name in unknown.splitlines())
    text = redact_text(text, SHORTEST_SECRET)
    return text[:DIFF_BYTES] + "\n# cut here\n" if len(text) > DIFF_BYTES else text


def environment_freeze() -> str:
    """`name==version` of every installed package, sorted, below the interpreter's version."""
    found = {
        f"{name}=={package.version}"
        for package in importlib.metadata.distributions()
        if (name := package.metadata["Name"])
    }
    head = f"# Python {platform.python_version()}, {platform.platform()}"
    return "\n".join([head, *sorted(found, key=str.lower), ""])


def batch_scripts(run: RunDir) -> list[Path]:
    """SLURM scripts that lie in the run directory."""
    return sorted({path for pattern in BATCH_SCRIPTS for path in run.path.glob(pattern)})


def job_tags(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Where SLURM runs this, if it does."""
    names = {"job_id": "SLURM_JOB_ID", "job_array": "SLURM_ARRAY_JOB_ID", "job_nodes": "SLURM_JOB_NODELIST"}
    return {tag: environ[variable] for tag, variable in names.items() if environ.get(variable)}


def _git(directory: Path | None, *words: str) -> str | None:
    try:
        told = subprocess.run(
            ["git", *words],
            cwd=directory,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() if told.returncode == 0 else None
