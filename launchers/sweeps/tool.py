"""`prl sweep DIRECTORY`: where a sweep stands; writes its report anew."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from launchers.sweeps.book import Book
from launchers.sweeps.tell import tell


def main(words: list[str]) -> int:
    """The exit code: 0 when every element finished well, 2 when there is no sweep."""
    parser = argparse.ArgumentParser(prog="prl sweep", description=__doc__)
    parser.add_argument("directory", type=Path, help="directory of the sweep, e.g. multirun/<sweep>")
    book = Book(parser.parse_args(words).directory.resolve())
    if not book.exists:
        print(f"{book.path} is not a sweep: it has no sweep.json", file=sys.stderr)
        return 2
    return tell(book)
