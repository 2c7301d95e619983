"""Objects of a user's own package, named in the configuration as `package.module:Name`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def load_object(path: str, key: str) -> Any:
    """The object at `path`. Raises ValueError naming the config `key` when there is none."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{key}={path!r}: write it as `package.module:Name`")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{key}={path!r}: there is no module {error.name!r}; install its package or add it to PYTHONPATH"
        ) from error
    if not hasattr(module, name):
        public = ", ".join(sorted(entry for entry in vars(module) if not entry.startswith("_")))
        raise ValueError(f"{key}={path!r}: module {module_name!r} has no {name!r}; it has {public}")
    return getattr(module, name)


def require_module(path: str, key: str) -> None:
    """Raises ValueError naming the config `key` unless the module of `path` is there.

    It is not imported: the launcher stays light, and a loss imports torch.
    """
    module = path.partition(":")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except (ModuleNotFoundError, ValueError):  # a parent package is missing, or is no package
        found = None
    if found is None:
        raise ValueError(
            f"{key} = {path}: there is no module {module!r}; install its package or add it to PYTHONPATH"
        )
