"""`prl export` from a checked config to an exit code; a dry run says what would be written."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from prl.checkpoint.export_source import ExportSource, locate, output_directory

REFUSED = 2


def launch_export(config: Any, command_line: str | list[str]) -> int:
    """The exit code: 0, or 2 after one line that says what is wrong."""
    if config.dry_run:
        return _plan(config)
    from prl.checkpoint.export import run

    return run(config)


def check_export(config: Any) -> tuple[ExportSource, Path]:
    """(what would be exported, where to). Raises ValueError when one of them will not do."""
    source = locate(config.run, config.step)
    out = output_directory(config.out, source)
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty: remove it or choose another out=")
    return source, out


def _plan(config: Any) -> int:
    try:
        source, out = check_export(config)
    except (ValueError, OSError) as error:
        print(f"export: {error}", file=sys.stderr)
        return REFUSED
    rows = {"checkpoint": source.step_dir, "model": source.model, "dtype": config.dtype, "directory": out}
    print(*(f"{name:11} {value}" for name, value in rows.items()), sep="\n")
    print("dry run: nothing was started, nothing was written")
    return 0
