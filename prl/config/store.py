"""Where the options live: `conf/` on disk, the schemas in Hydra's ConfigStore under `schema/`."""

from __future__ import annotations

import dataclasses
import os
import time
from functools import cache
from pathlib import Path
from typing import Any

from prl.config.schema import GROUPS, JOBS
from prl.config.sources import EnvConfig


def conf_dir() -> Path:
    """The directory of options: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parents[1]
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "rl.yaml").is_file():
            return candidate
    raise ValueError(f"no configuration options in {package / 'conf'} or {package.parent / 'conf'}")


@cache
def register_schemas() -> None:
    """Give Hydra the defaults of every schema, and the resolver that names a sweep.

    They go in as plain trees: Hydra refuses unknown keys, and types are judged by `prl.config.validate`
    after composition, which finds all mistakes instead of the first.
    """
    from omegaconf import OmegaConf

    for group, options in GROUPS.items():
        for name, schema in options.items():
            _store(f"schema/{group}", name, schema)
    _store("schema", "env", EnvConfig)
    for command, schema in JOBS.items():
        _store("schema", command, schema, "_global_")
    OmegaConf.register_new_resolver("sweep_id", sweep_id, replace=True)


def _store(group: str, name: str, schema: type, package: str | None = None) -> None:
    """`ConfigStore.store` makes a tree of every schema at once; a run needs a dozen of them."""
    from hydra.core.config_store import ConfigNode, ConfigStore

    table = ConfigStore.instance().repo
    for part in group.split("/"):
        table = table.setdefault(part, {})
    node: Any = Defaults(schema)
    table[f"{name}.yaml"] = ConfigNode(f"{name}.yaml", node, group, package, "prl")


class Defaults:
    """Stands for the tree of a schema's defaults until Hydra copies it, as it does before it reads one."""

    def __init__(self, schema: type) -> None:
        self.schema = schema

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        from omegaconf import OmegaConf

        return OmegaConf.create(defaults_of(self.schema))


def defaults_of(schema: type) -> dict[str, Any]:
    """Tree of a schema's defaults. A table that users replace as a whole starts as null."""
    made = schema()
    tree = dataclasses.asdict(made)
    for field in dataclasses.fields(schema):
        value = getattr(made, field.name)
        if field.metadata.get("replaced"):
            tree[field.name] = None
        elif dataclasses.is_dataclass(value):
            tree[field.name] = defaults_of(type(value))
    return tree


@cache
def sweep_id() -> str:
    """Makes the directory of this process's sweep unlike that of any other started in the same second."""
    return f"{os.getpid():x}{time.time_ns() // 1000 % 0xFFFF:04x}"
