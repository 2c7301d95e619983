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
    """Give Hydra the defaults of every option's schema, and the resolver that names a sweep.

    They go in as plain trees: Hydra refuses unknown keys, and types are judged by `prl.config.validate`
    after composition, which finds all mistakes instead of the first.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    store = ConfigStore.instance()
    for group, options in GROUPS.items():
        for name, schema in options.items():
            store.store(group=f"schema/{group}", name=name, node=defaults_of(schema))
    store.store(group="schema", name="env", node=defaults_of(EnvConfig))
    OmegaConf.register_new_resolver("sweep_id", sweep_id)


@cache
def register_job(command: str) -> None:
    """Give Hydra the schema of one command; each is large, and Hydra copies all that it was given."""
    from hydra.core.config_store import ConfigStore

    node = defaults_of(JOBS[command])
    ConfigStore.instance().store(group="schema", name=command, node=node, package="_global_")


def defaults_of(schema: type) -> dict[str, Any]:
    """Tree of a schema's defaults. A table that users replace as a whole starts as null."""
    tree = dataclasses.asdict(schema())
    for field in dataclasses.fields(schema):
        if field.metadata.get("replaced"):
            tree[field.name] = None
    return tree


@cache
def sweep_id() -> str:
    """Makes the directory of this process's sweep unlike that of any other started in the same second."""
    return f"{os.getpid():x}{time.time_ns() // 1000 % 0xFFFF:04x}"
