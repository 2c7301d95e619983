"""Whether this launch is one element of a sweep, and what Hydra knows about it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SWEEP_VAR = "PRL_SWEEP_DIR"
ARRAY_VAR = "PRL_ARRAY_ELEMENT"
"""Set in the tasks of a sweep's SLURM array."""
PLUGINS = Path(__file__).with_name("plugins")


def find_plugins() -> None:
    """Let Hydra find prl's launchers and sweeper: it looks in the packages `hydra_plugins` on the path."""
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))


def sweep_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Directory of the sweep that this launch belongs to; None for a single run."""
    if SWEEP_VAR in environ:
        return Path(environ[SWEEP_VAR]).resolve()
    hydra = _multirun()
    return Path(hydra.sweep.dir).resolve() if hydra else None


def task_overrides(command_line: list[str]) -> list[str]:
    """The overrides of this run: in a sweep those of its element, else the words of the command line."""
    hydra = _multirun()
    return list(hydra.overrides.task) if hydra else [word for word in command_line if "=" in word]


def _multirun() -> Any | None:
    """Hydra's own config while it runs an element of a sweep. Hydra is not imported for the question."""
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    if not HydraConfig.initialized():
        return None
    hydra = HydraConfig.get()
    return hydra if hydra.mode == RunMode.MULTIRUN else None
