"""Objects of a user's own package, named in the configuration as `package.module:Name`."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from typing import Any

from prl.config.errors import nearest


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


def require_object(path: str, key: str) -> None:
    """Raises ValueError naming the config `key` unless the module of `path` is there and may have its object.

    The module is read, not imported: the launcher stays light, and a loss imports torch.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.util.find_spec(module) if module else None
    except (ModuleNotFoundError, ValueError):  # a parent package is missing, or is no package
        found = None
    if found is None:
        raise ValueError(
            f"{key} = {path}: there is no module {module!r}; install its package or add it to PYTHONPATH"
        )
    names = _names(Path(found.origin)) if found.origin and found.origin.endswith(".py") else None
    if name and names is not None and name not in names:
        close = nearest(name, sorted(names))
        remedy = f"; nearest: {close}" if close else ""
        raise ValueError(f"{key} = {path}: {found.origin} has no {name!r}{remedy}")


def _names(file: Path) -> set[str] | None:
    """All names that a module may define, by its source; None where the source cannot tell."""
    try:
        nodes = list(ast.walk(ast.parse(file.read_bytes())))
    except SyntaxError:
        return None
    imported = [
        alias for node in nodes if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
    ]
    names = {(alias.asname or alias.name).partition(".")[0] for alias in imported}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    names |= {node.name for node in nodes if isinstance(node, made)}
    return None if names & {"*", "__getattr__"} else names
