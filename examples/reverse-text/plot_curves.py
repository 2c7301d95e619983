"""Draw `curves.svg` and write `curves.csv`: `python plot_curves.py RUN_DIR...`, one finished run a seed."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

REWARD = "train/agg/effective/agent/reward/mean"
HERE = Path(__file__).parent


def rewards(run: Path) -> list[float]:
    """Mean reward of the trained rollouts of each step."""
    rows = [json.loads(line) for line in (run / "metrics" / "orchestrator.jsonl").read_text().splitlines()]
    return [row[REWARD] for row in rows if REWARD in row]


def main(runs: list[Path]) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    curves = [rewards(run) for run in runs]
    with (HERE / "curves.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["step", *(f"seed_{seed}" for seed in range(len(runs)))])
        for step, row in enumerate(zip(*curves, strict=True), 1):
            table.writerow([step, *(f"{reward:.4f}" for reward in row)])
    figure, axes = plt.subplots(figsize=(7, 3.2), layout="constrained")
    for seed, curve in enumerate(curves):
        axes.plot(range(1, len(curve) + 1), curve, label=f"seed {seed}")
    axes.set(xlabel="step", ylabel="training reward", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(HERE / "curves.svg", metadata={"Date": None})


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
