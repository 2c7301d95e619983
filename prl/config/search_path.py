"""Where a user's own options come from: `--config-dir` and `hydra.searchpath`. Each place must be there."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from prl.config.errors import Problem
from prl.config.store import conf_dir

KEY = "hydra.searchpath"


def judge_search_path(words: Sequence[str]) -> tuple[list[str], list[Problem]]:
    """(`words` without unusable search paths, what is wrong with those)."""
    kept, problems = [], []
    for word in words:
        key, equals, value = word.partition("=")
        found = _faults(value) if key.lstrip("+") == KEY and equals else []
        problems += found
        kept += [] if found else [word]
    return kept, problems


def _faults(value: str) -> list[Problem]:
    inner = value.strip()
    if not (inner.startswith("[") and inner.endswith("]")):
        return [Problem(KEY, value, "a list of places is needed", f"Write {KEY}=[file:///absolute/path].")]
    places = [place.strip().strip("'\"") for place in inner[1:-1].split(",") if place.strip()]
    return [Problem(KEY, place, reason) for place in places if (reason := _fault(place))]


def _fault(place: str) -> str:
    scheme, _, rest = place.rpartition("://")
    if scheme == "pkg":
        try:
            return "" if importlib.util.find_spec(rest.replace("/", ".")) else "no such package"
        except (ModuleNotFoundError, ValueError):
            return "no such package"
    if scheme in ("", "file"):
        return "" if Path(rest).expanduser().is_dir() else "no such directory"
    return ""


def check_directory(directory: Path) -> list[Problem]:
    """A directory of options must exist, hold text, and cannot replace options that prl ships."""
    if not directory.is_dir():
        return [Problem("--config-dir", directory, "no such directory")]
    ours = conf_dir()
    if directory == ours:
        return []
    reason = "prl ships an option of this name, so this file would be ignored"
    problems = []
    for path in sorted(directory.rglob("*.yaml")):
        if (ours / path.relative_to(directory)).is_file():
            problems.append(Problem("--config-dir", path, reason, "Give it another name."))
        elif not _is_text(path):
            problems.append(Problem("--config-dir", path, "not UTF-8 text", "Save it as UTF-8."))
    return problems


def _is_text(path: Path) -> bool:
    try:
        path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    return True


def other_command(command: str, config_name: str | None, commands: Sequence[str]) -> list[Problem]:
    """`--config-name` takes a primary config of the user's own, not that of another command."""
    if config_name in commands and config_name != command:
        remedy = f"Write prl {config_name}."
        return [Problem("--config-name", config_name, f"made for `prl {config_name}`", remedy)]
    return []
