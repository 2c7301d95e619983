"""Rules about what is told to the outside: the registered model, the heartbeat."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prl.config.errors import Problem, suggest
from prl.config.schema import LOG_LEVELS, EvalConfig, InferenceJobConfig, RlConfig, SftConfig
from prl.config.serving import MlflowConfig

PROCESSES = ("launcher", "inference", "teacher", "env", "orchestrator", "trainer", "sft", "evals", "eval")
"""Kinds of processes: the first part of the name of a log file."""


def registered_models_have_weights(config: RlConfig | SftConfig | EvalConfig) -> Iterator[Problem]:
    name = config.tracking.register_model if isinstance(config.tracking, MlflowConfig) else None
    if name is None:
        return
    path = "tracking.register_model"
    if not name.strip() or re.search(r"[/:]", name):
        yield Problem(path, name, "MLflow takes no model name that is empty or holds / or :")
    if isinstance(config, EvalConfig):
        yield Problem(path, name, "an evaluation makes no weights", "Leave it out.")
    elif isinstance(config, RlConfig) and not config.ckpt.at_end:
        reason = "the version is made from the checkpoint at the end, and none is saved"
        yield Problem(path, name, reason, "Set ckpt.at_end=true, or choose ckpt=end.", ("ckpt.at_end",))


def heartbeats_have_an_address(config: RlConfig | SftConfig | EvalConfig) -> Iterator[Problem]:
    url = config.monitor.heartbeat_url
    if url is not None and not re.match(r"https?://[^/]+", url):
        yield Problem(
            "monitor.heartbeat_url", url, "not a URL", "Write monitor.heartbeat_url=https://host/path."
        )


def log_levels_are_of_processes(
    config: RlConfig | SftConfig | EvalConfig | InferenceJobConfig,
) -> Iterator[Problem]:
    for process, level in config.log.levels.items():
        path = f"log.levels.{process}"
        if process.partition("/")[0] not in PROCESSES:
            yield Problem(path, level, "there is no such process", suggest(process, PROCESSES))
        if level not in LOG_LEVELS:
            yield Problem(path, level, "there is no such level", suggest(str(level), LOG_LEVELS))


RULES = [registered_models_have_weights, heartbeats_have_an_address, log_levels_are_of_processes]
