"""`prl bench config`: CPU time of the quick answers, as ratios to `python -c "import hydra"`."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REFUSED = 2
LIMIT = 2.5
"""Ratio that no answer may exceed."""

BASE = ["-c", "import hydra"]

ANSWERS = {
    "--help": ["--help"],
    "--cfg job": ["--cfg", "job"],
    "dry_run=true": ["dry_run=true"],
    "eval dry_run=true": ["eval", "dry_run=true"],
    "error (option)": ["algo=gpro"],
    "error (key)": ["optim.lrr=1"],
    "error (grammar)": ["run.name=a=b"],
}
"""Name -> words of a call that answers without starting anything."""


def main(words: Sequence[str]) -> int:
    """Print the table; exit code 1 when a ratio is above `LIMIT`."""
    parser = argparse.ArgumentParser(prog="prl bench config", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="calls of each, of which the least counts")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(list(words))
    base, seconds = measure(options.repeats)
    print(f"{'import hydra':20}{base:8.3f} s CPU")
    for name, used in seconds.items():
        print(f"{name:20}{used:8.3f} s CPU{used / base:8.2f} x{'  ABOVE THE LIMIT' * (used > LIMIT * base)}")
    if options.json:
        numbers = {"import_hydra_seconds": base, "seconds": seconds, "limit": LIMIT}
        options.json.write_text(json.dumps(numbers, indent=1) + "\n")
    return int(max(seconds.values()) > LIMIT * base)


def measure(repeats: int, answers: dict[str, list[str]] = ANSWERS) -> tuple[float, dict[str, float]]:
    """(CPU seconds of `import hydra`, those of each answer): the least of `repeats` calls, taken in turns.

    In turns, and the least: both sides then had the same luck with a busy machine.
    """
    base: list[float] = []
    found: dict[str, list[float]] = {name: [] for name in answers}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(repeats + 1):  # the first call compiles
            base.append(cpu_seconds([sys.executable, *BASE], Path(directory)))
            for name, words in answers.items():
                found[name].append(cpu_seconds([sys.executable, "-m", "prl", *words], Path(directory)))
    return min(base[1:]), {name: min(times[1:]) for name, times in found.items()}


def cpu_seconds(command: Sequence[str], directory: Path) -> float:
    """User and system time of one process in `directory`. Raises RuntimeError when it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": path}
    result = subprocess.run(
        command, cwd=directory, env=variables, capture_output=True, text=True, check=False
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if result.returncode not in (0, REFUSED):
        raise RuntimeError(f"{' '.join(command)} is no answer:\n{result.stderr[-2000:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
