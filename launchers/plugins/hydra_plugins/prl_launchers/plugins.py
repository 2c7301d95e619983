"""What Hydra finds here. It executes this module without importing it, so the classes live in others."""

from __future__ import annotations

import importlib.util

from hydra_plugins.prl_launchers._local import PrlLocalLauncher
from hydra_plugins.prl_launchers._optuna import PrlOptunaSweeper

__all__ = ["PrlLocalLauncher", "PrlOptunaSweeper"]

if importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None:
    from hydra_plugins.prl_launchers._slurm import PrlSlurmLauncher

    __all__ += ["PrlSlurmLauncher"]
