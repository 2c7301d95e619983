"""`prl import-toml rl.toml [more.toml ...] [key=value ...]`: a TOML file as an option of `experiment`."""

from __future__ import annotations

import argparse
import shlex
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prl.config.compose import compose_job
from prl.config.errors import ConfigErrors, Problem
from prl.import_toml import evaluation, rl, sft
from prl.import_toml.renamed import refuse_renamed
from prl.import_toml.translation import Translation
from prl.import_toml.tree import Tree, merged, without_disabled
from prl.import_toml.write import overlay

TRANSLATORS: dict[str, Callable[[Tree, Translation], None]] = {
    "rl": rl.translate,
    "sft": sft.translate,
    "eval": evaluation.translate,
}
REFUSED = 2


def main(words: Sequence[str]) -> int:
    """Exit codes: 0 written and composes, 2 refused, or written but something must be settled first."""
    options = _parser().parse_intermixed_args(list(words))
    files = [Path(word) for word in options.words if "=" not in word]
    overrides = [word for word in options.words if "=" in word]
    try:
        if not files:
            raise ConfigErrors([Problem("import-toml", "", "which file?", "Write prl import-toml rl.toml.")])
        table = _read(files)
        command = options.command or detect(table)
        notes = translate(command, table)
    except ConfigErrors as errors:
        print(errors, file=sys.stderr)
        return REFUSED
    name = options.name or files[-1].stem
    target = Path(options.out) / "experiment" / f"{name}.yaml"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(overlay(notes, ", ".join(file.name for file in files)), encoding="utf-8")
    line = ["python", "-m", "prl", command, "--config-dir", options.out, f"experiment={name}", *overrides]
    print(_report(notes, target), shlex.join(line), sep="\n")
    return _check(command, [f"experiment={name}", *overrides], options.out)


def translate(command: str, table: dict[str, Any]) -> Translation:
    """What `table`, a parsed file, is in prl. Raises ConfigErrors: all renamed, unknown or wrong keys."""
    tree, notes = Tree(without_disabled(table)), Translation(command)
    notes.problems += refuse_renamed(tree)
    TRANSLATORS[command](tree, notes)
    if notes.problems:
        raise ConfigErrors(notes.problems)
    return notes


def detect(table: dict[str, Any]) -> str:
    """The command that a file is of, by the tables it has."""
    if "orchestrator" in table or "trainer" in table:
        return "rl"
    if "source" in table or "client" in table:
        return "eval"
    if "data" in table or "optim" in table:
        return "sft"
    remedy = "Say so: --command rl, sft or eval."
    raise ConfigErrors(
        [Problem("import-toml", ", ".join(table), "neither an rl, an sft nor an eval file", remedy)]
    )


def _read(files: Sequence[Path]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for file in files:
        try:
            table = merged(table, tomllib.loads(file.read_text(encoding="utf-8")))
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigErrors([Problem("import-toml", file, str(error))]) from None
    return table


def _report(notes: Translation, target: Path) -> str:
    lines = [f"{len(notes.became)} keys became {target}"]
    if notes.without:
        lines.append("without counterpart in prl:")
        lines += [f"  {key}: {reason}" for key, reason in notes.without.items()]
    if notes.unsaid:
        lines.append("left unsaid, and other than the format's default:")
        lines += [f"  {key}: {reason}" for key, reason in notes.unsaid.items()]
    return "\n".join(lines)


def _check(command: str, overrides: list[str], directory: str) -> int:
    try:
        compose_job(command, overrides, [directory])
    except ConfigErrors as errors:
        print("to settle before it runs, by key=value at the end of the line:", file=sys.stderr)
        print(*(f"  {problem}" for problem in errors.problems), sep="\n", file=sys.stderr)
        return REFUSED
    print("it composes and passes the checks")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prl import-toml", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="FILE|key=value", help="files, later ones win; overrides")
    parser.add_argument(
        "--command", choices=sorted(TRANSLATORS), help="what the file is for, if it cannot be told"
    )
    parser.add_argument(
        "--out", default="imported", help="directory of options to write into (default: imported)"
    )
    parser.add_argument("--name", help="name of the experiment (default: that of the last file)")
    return parser
