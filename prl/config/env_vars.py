"""Environment variables of a run's processes: schema, rule, and what one process gets.

Low to high: the environment that prl was started in, prl's defaults for every process, prl's defaults for
this one, `env_vars.all`, the component's own, an environment's own, what prl itself must set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from prl.config.errors import Problem
from prl.config.fields import opt

PROTECTED = (
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MLFLOW_RUN_ID",
    "MLFLOW_TRACKING_URI",
    "RANK",
    "WORLD_SIZE",
)
"""Set by prl for each process, or dropped."""

OWN_PREFIX = "PRL_"
"""prl's own names; the two below are the user's to set."""

USERS_OWN = ("PRL_API_KEY", "PRL_OUTPUT_DIR")

SECRET = re.compile(r"(API_?KEY|TOKEN|SECRET|PASSWORD|CREDENTIALS?)$")

COMPONENTS = {
    "rl": ("trainer", "inference", "orchestrator", "env"),
    "sft": ("trainer", "inference", "orchestrator", "env"),
    "eval": ("inference", "orchestrator", "env"),
    "inference": ("inference",),
}
"""Command -> the components that its run has."""

ROLES = {"sft": "trainer", "teacher": "inference", "eval": "orchestrator", "evals": "orchestrator"}
"""First part of a role's name -> its component, where they are not called the same."""


@dataclass
class EnvVarsConfig:
    """Environment variables of the processes, by component."""

    all: dict[str, str] = opt(factory=dict, doc="Variables of every process.")
    trainer: dict[str, str] = opt(factory=dict, doc="Variables of the trainer ranks.")
    inference: dict[str, str] = opt(factory=dict, doc="Variables of engines, their router, and teachers.")
    orchestrator: dict[str, str] = opt(
        factory=dict, doc="Variables of the orchestrator; in `prl eval`, of the process that evaluates."
    )
    env: dict[str, str] = opt(
        factory=dict, doc="Variables of all environment servers; env.<name>.env_vars are one's own."
    )


def variables(config: Any, role: str) -> dict[str, str]:
    """What the user sets for the process `role` (`trainer/0`, `env/words`), the layers merged."""
    first, _, rest = role.partition("/")
    component = ROLES.get(first, first)
    own = _environment(config, rest).env_vars if component == "env" else {}
    return {**config.env_vars.all, **getattr(config.env_vars, component), **own}


def _environment(config: Any, name: str) -> Any:
    """The environment of `env/<name>`, or of `env/eval/<name>` for one to evaluate on while training."""
    split, _, evaluated = name.partition("/")
    return config.eval.env[evaluated] if evaluated and split == "eval" else config.env[name]


def names_are_free(config: Any) -> Iterator[Problem]:
    """Names that prl needs are refused, as are components that the command does not have."""
    command = _command(config)
    present = COMPONENTS[command]
    for path, table in _tables(config):
        component = path.removeprefix("env_vars.")
        if table and component in {entry.name for entry in fields(EnvVarsConfig)} - {"all", *present}:
            reason = f"prl {command} has no such process"
            yield Problem(path, ", ".join(table), reason, f"It has: {', '.join(present)}.")
        for name, value in table.items():
            yield from _judge(f"{path}.{name}", name, value)


def _judge(path: str, name: str, value: str) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
        yield Problem(path, value, "not a name of an environment variable")
    elif name in PROTECTED or (name.startswith(OWN_PREFIX) and name not in USERS_OWN):
        yield Problem(path, value, "prl sets this variable itself", "Leave it out.")
    elif "\0" in value:
        yield Problem(path, "...", "a value cannot hold a NUL character")
    elif SECRET.search(name):
        reason = "it looks like a secret, and the configuration is written to the run directory"
        yield Problem(path, "...", reason, f"Export {name} before the command instead.", warning=True)


def _tables(config: Any) -> Iterator[tuple[str, dict[str, str]]]:
    for entry in fields(EnvVarsConfig):
        yield f"env_vars.{entry.name}", getattr(config.env_vars, entry.name)
    for name, env in getattr(config, "env", {}).items():
        yield f"env.{name}.env_vars", env.env_vars
    for name, env in getattr(getattr(config, "eval", None), "env", {}).items():
        yield f"eval.env.{name}.env_vars", env.env_vars


def _command(config: Any) -> str:
    """The command whose config this is."""
    from prl.config.schema import JOBS

    return next(command for command, schema in JOBS.items() if type(config) is schema)
