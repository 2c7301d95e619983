"""Rules of `eval`: evaluations on verifiers environments while a run trains."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from prl.config.errors import Problem, suggest
from prl.config.evals import EvalEnvConfig, OnlineEvalConfig
from prl.config.rules_eval import find_taskset, shipped_tasksets, taskset_module

OF_TRAINING = ("ratio", "algo", "curriculum", "min_abs_advantage")
"""Fields of an environment that speak of training only."""

RESERVED = ("agg", "all")


def eval_environments_are_sound(config: Any) -> Iterator[Problem]:
    plain = EvalEnvConfig()
    for name, env in config.eval.env.items():
        path = f"eval.env.{name}"
        if name in RESERVED or not re.fullmatch(r"[\w-]+", name):
            yield Problem(
                path, name, "a name of letters, digits, `_` and `-` is needed, other than agg and all"
            )
        for key in OF_TRAINING:
            if getattr(env, key) != getattr(plain, key):
                reason = "an evaluation has no use for it"
                yield Problem(f"{path}.{key}", getattr(env, key), reason, f"Remove {path}.{key}.")
        taskset = env.id or name
        if not find_taskset(taskset_module(taskset)):
            where = "looked in prl, in verifiers and on the path"
            remedy = suggest(taskset, shipped_tasksets())
            yield Problem(f"{path}.id", taskset, f"no such environment or taskset: {where}", remedy)


def evals_have_environments(config: Any) -> Iterator[Problem]:
    if config.eval.env or config.eval == OnlineEvalConfig():
        return
    reason = "there is no environment to evaluate on, so nothing of `eval` will act"
    yield Problem("eval.env", "{}", reason, "Write eval.env=[reverse_text].", warning=True)


def eval_completions_leave_room(config: Any) -> Iterator[Problem]:
    longest = config.inference.max_model_len
    nodes = {"eval.sampling": config.eval.sampling}
    nodes |= {f"eval.env.{name}.sampling": env.sampling for name, env in config.eval.env.items()}
    for path, node in nodes.items():
        if node.max_tokens is not None and node.max_tokens >= longest:
            reason = f"leaves no room for a prompt within inference.max_model_len = {longest}"
            involves = ("inference.max_model_len",)
            yield Problem(
                f"{path}.max_tokens", node.max_tokens, reason, f"Set at most {longest - 1}.", involves
            )


def long_evals_do_not_starve_broadcasts(config: Any) -> Iterator[Problem]:
    """A broadcast waits for the engines, and these keep their weights until an evaluation is complete."""
    sync = getattr(config, "sync", None)
    if config.eval.env and config.eval.pin_version and sync is not None and sync.name == "collective":
        reason = f"an evaluation that takes longer than sync.timeout = {sync.timeout:g} s ends the run"
        remedy = "Raise sync.timeout, or set eval.pin_version=false."
        yield Problem("eval.pin_version", True, reason, remedy, ("sync.timeout",), warning=True)


def elastic_servers_have_room(config: Any) -> Iterator[Problem]:
    nodes = {f"env.{name}": env for name, env in getattr(config, "env", {}).items()}
    nodes |= {f"eval.env.{name}": env for name, env in config.eval.env.items()}
    for path, env in nodes.items():
        if env.elastic and env.workers == 1:
            reason = f"{path}.workers = 1 leaves no worker to add"
            yield Problem(f"{path}.elastic", True, reason, f"Set {path}.workers=4.", (f"{path}.workers",))


RULES: list[Callable[[Any], Iterator[Problem]]] = [
    eval_environments_are_sound,
    evals_have_environments,
    eval_completions_leave_room,
    long_evals_do_not_starve_broadcasts,
    elastic_servers_have_room,
]
