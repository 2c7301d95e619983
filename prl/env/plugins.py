"""Ids of tasksets and harnesses -> modules that verifiers finds.

verifiers imports a plugin by the last part of its id, from its own packages or from the top level. prl's
plugins live in `prl.env` and a user's may live anywhere, so each is imported under its real name and then
made known to verifiers under the id it was asked for.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType

from verifiers.v1.utils.loaders import taskset_class

from prl.env import inprocess_chat, tasksets

TASKSETS = "verifiers.v1.tasksets"
HARNESSES = "verifiers.v1.harnesses"


def shipped_tasksets() -> list[str]:
    """Ids of the tasksets that come with prl."""
    return sorted(module.name for module in pkgutil.iter_modules(tasksets.__path__) if module.name[0] != "_")


def register_taskset(taskset_id: str) -> None:
    """Make `taskset_id` importable by verifiers: prl's own, then verifiers', then any module of that name.

    Raises ValueError if there is none, if the module's own imports fail (naming what is missing), and if it
    does not export one taskset.
    """
    name = taskset_id.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    known_as = f"{TASKSETS}.{name.lower()}"
    if known_as not in sys.modules:
        sys.modules[known_as] = _import_taskset(taskset_id, name)
    try:
        taskset_class(taskset_id)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"taskset {taskset_id!r}: {error}") from error


def register_harness() -> None:
    """Make `inprocess-chat` importable by verifiers."""
    sys.modules[f"{HARNESSES}.{inprocess_chat.HARNESS_ID.replace('-', '_')}"] = inprocess_chat


def _import_taskset(taskset_id: str, name: str) -> ModuleType:
    target = _find(name)
    if target is None:
        near = difflib.get_close_matches(name, shipped_tasksets(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"no taskset {taskset_id!r}: {hint}prl ships {', '.join(shipped_tasksets())}; verifiers has none "
            f"of this name; no module {name!r} is importable (is its directory on PYTHONPATH?)"
        )
    try:
        return importlib.import_module(target)
    except ImportError as error:
        raise ValueError(f"taskset {taskset_id!r}: module {target!r} fails to import: {error}") from error


def _find(name: str) -> str | None:
    """Full name of the module that holds the taskset `name`."""
    if "." not in name:
        for candidate in (f"{tasksets.__name__}.{name}", f"{TASKSETS}.{name}"):
            if importlib.util.find_spec(candidate):
                return candidate
    try:
        return name if importlib.util.find_spec(name) else None
    except ModuleNotFoundError:
        return None
