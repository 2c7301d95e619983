"""What a tracker is told about a run beside its metrics, and the tags by which runs are found."""

from __future__ import annotations

import getpass
import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.run_dir import RunDir
from prl.tracking.names import safe_name
from prl.tracking.provenance import code_directory, git_commit, job_tags
from prl.tracking.secrets import redact_override


@dataclass(frozen=True)
class Facts:
    """What the tracker is told about a run beside its metrics. `sweep`: directory of its sweep, if any."""

    run: RunDir
    command: str
    config: Any
    overrides: list[str]
    sweep: Path | None = None


def tags_of(facts: Facts) -> dict[str, str]:
    """Tags by which runs are found and compared."""
    config, commit = facts.config, git_commit(code_directory())
    tags = {
        "command": facts.command,
        "model": config.model.name,
        "cluster": config.cluster.name,
        "attempt": str(facts.run.attempt),
        "run_dir": str(facts.run.path),
        "overrides": shlex.join(map(redact_override, facts.overrides)),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"prl {facts.command}",
        "mlflow.source.type": "LOCAL",
    }
    if facts.command == "rl":
        tags |= {"algo": config.algo.name, "loss": config.loss.name}
    if facts.command in ("rl", "eval"):
        tags["env"] = ",".join(config.env)
    if facts.command == "sft":
        tags["data"] = config.data.name
    if commit:
        tags |= {"git_commit": commit, "mlflow.source.git.commit": commit}
    tags |= job_tags()
    return tags | {safe_name(key): value for key, value in config.run.tags.items()}


def user_name() -> str:
    """Who runs this; the number of an account that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
