"""The words of `prl bench trainer`, `sft` and `ckpt`: `word=value[,value...]` and `--json`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def split_options(tool: str, usage: str, words: Sequence[str]) -> tuple[Path | None, list[str]] | None:
    """(where results go as JSON, the other words); None after `--help`, which prints `usage`."""
    parser = argparse.ArgumentParser(prog=f"prl {tool}", usage=usage, add_help=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", type=Path)
    options, rest = parser.parse_known_args(list(words))
    if options.help:
        print(usage)
        return None
    return options.json, rest


def combinations(words: Sequence[str], own: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Every combination of the comma-separated values; `own` are the defaults of a benchmark's own words.

    Raises ValueError for a word that is none.
    """
    choices: dict[str, list[str]] = {key: [value] for key, value in own.items()}
    for word in words:
        key, equals, value = word.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{word!r} is no word=value; --help lists them")
        choices[key] = [value] if value[0] in "[{" else value.split(",")
    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))


def count(key: str, value: str) -> int:
    """A count. Raises ValueError below 1 and for anything else."""
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{key}={value}: a number of at least 1 is needed")
    return int(value)


def write_results(path: Path | None, results: Any) -> None:
    if path:
        path.write_text(json.dumps(results, indent=1) + "\n")
