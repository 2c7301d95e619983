"""Which groups a command chooses from, and where else an option may be put."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING

from prl.config.errors import NO_VALUE, Problem, suggest
from prl.config.schema import JOBS
from prl.config.store import conf_dir

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

OPTIONAL_GROUPS = ("experiment", "debug", "sweep")
"""Groups of which a run may have none, or several options at once."""

PLACES = {
    "algo": r"env\.[\w-]+\.algo",
    "curriculum": r"env\.[\w-]+\.curriculum",
    "data": r"val\.data",
    "env": r"(eval\.)?env\.[\w-]+",
}
"""Where an option of a group may be put (`algo@env.words.algo=opd`), beside its own place."""

IGNORED = ("hydra.run.dir", "hydra.job.chdir", "hydra.output_subdir", "hydra.mode")
"""Keys of Hydra that would have no effect."""


def groups_of(command: str) -> list[str]:
    """Groups that prl ships and `command` has a place for."""
    fields = {entry.name for entry in dataclasses.fields(JOBS[command])}
    primary = (conf_dir() / f"{command}.yaml").read_text(encoding="utf-8")
    optional = [group for group in OPTIONAL_GROUPS if f"- {group}: null" in primary]
    return sorted([*optional, *(group for group in fields if (conf_dir() / group).is_dir())])


def misplaced(command: str, override: Override) -> Problem | None:
    """What is wrong with choosing from this group here; None for groups of the user's own."""
    group, package = override.key_or_group, override.package
    shown = f"{group}@{package}" if package else group
    value = NO_VALUE if override.is_delete() else (override.input_line or "").partition("=")[2]
    top, _, below = group.partition("/")
    if not top or not (conf_dir() / top).is_dir() or (top, below) == ("recipe", command):
        return None
    groups = groups_of(command)
    if package is None and group not in groups:
        return Problem(shown, value, f"`prl {command}` has no such choice", suggest(group, groups))
    if group in OPTIONAL_GROUPS:
        return None
    if package is not None and not re.fullmatch(PLACES.get(group, r"(?!)"), package):
        places = re.sub(r"\\|\(|\)\?", "", PLACES.get(group, "")).replace("[w-]+", "<name>")
        remedy = f"Write {group}@{places}={value}." if places else f"Write {group}={value}."
        return Problem(shown, value, "there is no such place", remedy)
    if override.is_add() and package is None and group != "env":
        return Problem(shown, value, "a run has one of this group already", f"Write {group}={value}.")
    return None


def unfit_list(group: str, names: list[str]) -> Problem | None:
    """What is wrong with choosing several options at once."""
    shown = f"[{','.join(names)}]"
    if group not in ("env", "eval.env") and group not in OPTIONAL_GROUPS and len(names) != 1:
        return Problem(
            group, shown, "one choice is needed", f"Write {group}=<option>; --multirun tries several."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        return Problem(group, shown, f"{', '.join(twice)} is named twice", "Name it once.")
    return None


def ignored_by_prl(key: str, value: str) -> Problem | None:
    """A key of Hydra that would be taken and not act."""
    if key in IGNORED:
        reason = "prl makes a run's directory itself and stays where it was called"
        return Problem(key, value, reason, "Set output_dir and run.name.")
    if key == "hydra.sweep.dir" and not value.strip("'\" "):
        return Problem(key, value, "a directory is needed")
    return None
