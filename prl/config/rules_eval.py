"""Rules of `prl eval`: environments, endpoint, checkpoints, and the run's place."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prl.config import rules_monitor, rules_rl, rules_training
from prl.config.errors import Problem, suggest
from prl.config.schema import EvalConfig, RlConfig
from prl.config.serving import ExternalConfig

FINAL = "final"


def is_external(config: EvalConfig) -> bool:
    return isinstance(config.inference, ExternalConfig)


def tasksets_are_installed(config: RlConfig | EvalConfig) -> Iterator[Problem]:
    """Looks for modules without importing them: verifiers alone takes seconds.

    In `prl rl` it is a warning: an environment's server may find it by its own `env_vars`.
    """
    for name, env in config.env.items():
        taskset = env.id or name
        module = taskset_module(taskset)
        if find_taskset(module):
            continue
        shipped = suggest(module, shipped_tasksets())
        shipped = shipped.replace("valid:", "prl ships").replace("Valid:", "prl ships")
        where = f"looked for the module {module!r} in prl, in verifiers and on the path"
        reason = f"no such environment or taskset: {where}"
        remedy = f"{shipped} Is its directory on PYTHONPATH?"
        may_be = isinstance(config, RlConfig)
        yield Problem(f"env.{name}.id", taskset, reason, remedy, (f"env.{name}",), warning=may_be)


def taskset_module(taskset: str) -> str:
    """The module that an id names: `owner/my-set@1` -> `my_set`."""
    return taskset.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")


def shipped_tasksets() -> list[str]:
    from prl.env import tasksets

    return sorted(found.name for found in pkgutil.iter_modules(tasksets.__path__) if found.name[0] != "_")


def find_taskset(module: str) -> bool:
    """Whether prl, verifiers or the Python path has the module."""
    if module.lower() in shipped_tasksets():
        return True
    verifiers = importlib.util.find_spec("verifiers")
    for place in (verifiers.submodule_search_locations or []) if verifiers else []:
        if (Path(place) / "v1" / "tasksets" / module.lower()).with_suffix(".py").is_file():
            return True
        if (Path(place) / "v1" / "tasksets" / module.lower()).is_dir():
            return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ModuleNotFoundError, ValueError):
        return False


def model_is_served(config: EvalConfig) -> Iterator[Problem]:
    """An endpoint knows its models itself; checkpoints bring their own."""
    if not is_external(config) and not config.steps:
        yield from rules_training.model_is_there(config)  # type: ignore[arg-type]


def endpoint_has_an_address(config: EvalConfig) -> Iterator[Problem]:
    url = config.client.base_url
    if is_external(config):
        path = "client.base_url" if url else "inference.base_url"
        yield from rules_rl.check_api_url(path, config.inference.base_url)
    elif url is not None:
        reason = f"inference={config.inference.name} starts an engine of its own"
        yield Problem("client.base_url", url, reason, "Add inference=external.", ("inference.name",))


def completions_leave_room(config: EvalConfig) -> Iterator[Problem]:
    if not is_external(config):
        yield from rules_rl.completions_leave_room(config)  # type: ignore[arg-type]


def steps_are_checkpoints(config: EvalConfig) -> Iterator[Problem]:
    if config.checkpoints and not config.steps:
        remedy = "Write steps=[10,20,final]."
        yield Problem("checkpoints", config.checkpoints, "no steps of it are chosen", remedy, ("steps",))
    if not config.steps:
        return
    if is_external(config):
        reason = "an endpoint that someone else runs takes no checkpoints"
        yield Problem("steps", config.steps, reason, "Choose inference=embedded.", ("inference.name",))
    for step in config.steps:
        if step != FINAL and (isinstance(step, bool) or not isinstance(step, int) or step < 1):
            remedy = "Write numbers from 1 on, or final: steps=[10,20,final]."
            yield Problem("steps", step, "not a step", remedy)
    source = config.checkpoints or config.model.path
    if source is None:
        remedy = "Add model.path=outputs/<run.name>."
        yield Problem("steps", config.steps, "it is not said of which run", remedy)
    elif not Path(source).expanduser().is_dir():
        path = "checkpoints" if config.checkpoints else "model.path"
        yield Problem(path, source, "no such directory", "Give a run directory, e.g. outputs/<run.name>.")


def resume_is_by_name(config: EvalConfig) -> Iterator[Problem]:
    resume = config.run.resume
    if resume is None:
        return
    if resume != "latest":
        reason = "an evaluation is resumed as a whole"
        yield Problem("run.resume", resume, reason, "Write run.resume=latest (or --resume).")
    elif config.run.name is None:
        remedy = "Add run.name=<the evaluation to continue>."
        yield Problem("run.resume", resume, "it is not said which one", remedy, ("run.name",))


def selections_are_readable(config: Any) -> Iterator[Problem]:
    nodes = (
        {"select": config.select} if isinstance(config, EvalConfig) else {"eval.select": config.eval.select}
    )
    nodes |= {f"env.{name}.select": env.select for name, env in getattr(config, "env", {}).items()}
    online = getattr(config.eval, "env", {})
    nodes |= {f"eval.env.{name}.select": env.select for name, env in online.items()}
    for path, select in nodes.items():
        for kind in ("include", "exclude"):
            for item in getattr(select, kind).idx:
                if not re.fullmatch(r"\d+|\d*:\d*(:[1-9]\d*)?", str(item)):
                    remedy = "Write positions from 0 and slices: [3,'10:20','100:']."
                    yield Problem(f"{path}.{kind}.idx", item, "neither a position nor a slice", remedy)


RULES: list[Callable[[Any], Iterator[Problem]]] = [
    rules_rl.environments_are_named,
    tasksets_are_installed,
    selections_are_readable,
    model_is_served,
    endpoint_has_an_address,
    completions_leave_room,
    steps_are_checkpoints,
    rules_training.tracking_store_is_safe,
    *rules_monitor.RULES,
    rules_training.run_has_a_place,
    resume_is_by_name,
]
