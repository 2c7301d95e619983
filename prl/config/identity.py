"""Derived values: the run's name and paths; and the rules a name must obey."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any

MAX_NAME_BYTES = 200
"""File systems allow 255; logs and checkpoints add to it."""


def complete(command: str, config: Any) -> Any:
    """Fill what the user left open, in place: `run.name`, `~` in paths. Returns `config`."""
    for node, key in _path_fields(command, config):
        value = getattr(node, key)
        if isinstance(value, str) and value.startswith("~"):
            setattr(node, key, str(Path(value).expanduser()))
    if command != "export" and config.run.name is None:
        config.run.name = auto_name(command, config)
    return config


def auto_name(command: str, config: Any) -> str:
    """`<envs, data or serve>--<model>--<8 hex>`, lower-case."""
    if command == "inference":
        source = "serve"
    else:
        source = _data_name(config.data) if command == "sft" else "+".join(config.env) or "no-env"
    model = config.model.name.rstrip("/").rpartition("/")[2]
    return f"{_slug(source)}--{_slug(model)}--{secrets.token_hex(4)}".lower()


def _data_name(data: Any) -> str:
    """What training data is called: the last part of the path of your own, else its name."""
    return Path(data.path).stem if data.name == "rows" else str(data.name)


def name_fault(name: str) -> str | None:
    """Why `name` cannot name a run directory; None when it can."""
    if name in ("", ".", ".."):
        return "not a name"
    if "/" in name or "\\" in name:
        return "a name has no slashes; the parent directory is `output_dir`"
    if name.startswith(("-", ".")):
        return f"a name cannot start with {name[0]!r}: tools would take it for an option or hide it"
    if name != name.strip():
        return "a name cannot begin or end with a space"
    if not name.isprintable():
        return "a name has printable characters only"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"a name has at most {MAX_NAME_BYTES} bytes, this one {len(name.encode())}"
    return None


def run_path(config: Any) -> Path:
    """The run directory that `config` names."""
    return Path(config.output_dir).expanduser() / config.run.name


def _slug(text: str) -> str:
    return re.sub(r"[^\w+.-]+", "-", text).strip("-.") or "x"


def _path_fields(command: str, config: Any) -> list[tuple[Any, str]]:
    if command == "export":
        return [(config, "run"), (config, "out")]
    common = [(config, "output_dir"), (config.model, "path"), (config.run, "resume")]
    if command == "inference":
        return common
    return [*common, (config, "checkpoints") if command == "eval" else (config.ckpt, "dir")]
