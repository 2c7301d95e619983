"""A rank of supervised runs: `python sft_ranks.py <folder> <rank> <ranks>`, see `sft_lab.run_ranks`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launchers.role import end_now
from prl.config.load import load_resolved
from prl.run_dir import RunDir
from prl.sft import main as sft
from prl.trainer import distributed


def main(folder: Path, rank: int, ranks: int) -> None:
    world = distributed.join(rank, ranks, folder / "store", timeout=600)
    for number, run in enumerate(json.loads((folder / "jobs.json").read_text())):
        _, config = load_resolved(folder / f"{number}.yaml")
        record_rows(Path(run), rank)
        sft.main(config, RunDir(Path(run)), f"sft/{rank}")
    distributed.leave(world)


def record_rows(run: Path, rank: int) -> None:
    """Write the ids of the rows that this rank trains on, one line a step."""
    original = sft.train_step.__wrapped__ if hasattr(sft.train_step, "__wrapped__") else sft.train_step

    def train_step(engine, rows, loss, step, **options):
        run.mkdir(parents=True, exist_ok=True)
        with (run / f"rows-{rank}.jsonl").open("a") as file:
            file.write(json.dumps([step, [name for row in rows for name in row.trace_ids]]) + "\n")
        return original(engine, rows, loss, step, **options)

    train_step.__wrapped__ = original
    sft.train_step = train_step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    end_now(0)  # as ranks of a run do
