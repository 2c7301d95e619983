"""What an option file says about itself: its first comment line, and which command it is made for."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

AUDIENCE = re.compile(r"^(rl|sft|eval|export): ")
"""An experiment or debug option that fits one command only names it first: `# sft: choose to ...`."""


def headline(text: str) -> str:
    """First comment line of an option file, without Hydra's own `# @package` line; "" without one."""
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        comment = line.lstrip("#").strip()
        if not comment.startswith("@"):
            return comment
    return ""


def split_audience(comment: str) -> tuple[str | None, str]:
    """(command that the option is made for or None, the rest of the comment)."""
    match = AUDIENCE.match(comment)
    return (match.group(1), comment[match.end() :]) if match else (None, comment)


def audience(directories: Iterable[Path], group: str, name: str) -> str | None:
    """The command that an option is made for; None when it suits every command."""
    for directory in directories:
        path = directory / group / f"{name}.yaml"
        if path.is_file():
            return split_audience(headline(path.read_text(encoding="utf-8", errors="replace")))[0]
    return None
