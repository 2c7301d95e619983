"""Learning of every algorithm on the CPU default, measured: one short run a seed, one row of a table each.

    python examples/algorithms/measure.py [algorithm ...] [--seeds 0,1,2] [--out outputs/algorithms]

prints the table of README.md. Runs go one after another; a run that is already there is read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REWARD = "train/agg/all/{}/reward/mean"
SMALL = ["rollout.batch_size=64", "rollout.group_size=8", "tracking=none", "log.display=none"]
SPAN = 3


@dataclass(frozen=True)
class Case:
    """What to run, and which metric of which stream tells that it learned.

    `moved(first, last)` judges the first step and the mean of the last `SPAN` steps.
    """

    overrides: Sequence[str]
    stream: str
    metric: str
    moved: Callable[[float, float], bool]
    claim: str


def _up(by: float) -> Callable[[float, float], bool]:
    return lambda first, last: last >= first + by


def _third_less(first: float, last: float) -> bool:
    return last <= first * 2 / 3


def _halved(first: float, last: float) -> bool:
    return abs(last) <= abs(first) / 2


CASES = {
    "grpo": Case(
        ["max_steps=12"], "orchestrator", REWARD.format("agent"), _up(0.2), "reward up by 0.2 and more"
    ),
    "max_rl": Case(
        ["max_steps=12"], "orchestrator", REWARD.format("agent"), _up(0.2), "reward up by 0.2 and more"
    ),
    "echo": Case(
        ["env=[checked_reverse]", "algo.roles.tool.alpha=0.01", "max_steps=12"],
        "orchestrator",
        REWARD.format("agent"),
        _up(0.2),
        "reward up by 0.2 and more",
    ),
    "opd": Case(["max_steps=8"], "trainer", "ref_kl/mean", _halved, "mean reverse KL down to half"),
    "opsd": Case(
        [
            "algo.template='{demonstration}'",
            "+env.reverse_text.taskset.max_length=4",
            "optim.lr=5e-4",
            "max_steps=30",
        ],
        "trainer",
        "ref_kl/mean",
        _halved,
        "mean reverse KL down to half",
    ),
    "sft": Case(
        ["rollout.batch_size=128", "max_steps=24"],
        "trainer",
        "nll/mean",
        _third_less,
        "nll down by a third and more",
    ),
    "rae": Case(
        ["env=[kuhn_poker]", "rollout.group_size=1", "algo.decay=0.97", "max_steps=8"],
        "orchestrator",
        "baseline gap",
        lambda first, last: last < 0.25,
        "baseline of each agent within 0.25 of its mean reward",
    ),
    "hierarchical_grpo": Case(
        ["env=[proposer_solver]", "rollout.group_size=4", "max_steps=12"],
        "orchestrator",
        REWARD.format("solver"),
        _up(0.2),
        "solver reward up by 0.2 and more",
    ),
}


def run(algorithm: str, seed: int, out: Path) -> Path:
    """The run directory of one case. Raises RuntimeError with the output of a run that failed."""
    directory = out / f"{algorithm}-{seed}"
    if not (directory / "metrics" / "trainer.jsonl").is_file():
        words = [f"algo={algorithm}", f"seed={seed}", f"run.name={directory.name}", f"output_dir={out}"]
        command = [sys.executable, "-m", "prl", *words, *SMALL, *CASES[algorithm].overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return directory


def series(directory: Path, stream: str, metric: str) -> list[float]:
    """Values of a metric, one a step."""
    lines = (directory / "metrics" / f"{stream}.jsonl").read_text().splitlines()
    return [row[metric] for row in map(json.loads, lines) if metric in row]


def curve(algorithm: str, directory: Path) -> list[float]:
    """The metric that the algorithm shall move, step by step."""
    case = CASES[algorithm]
    if case.metric == "baseline gap":
        return baseline_gap(directory)
    return series(directory, case.stream, case.metric)


def baseline_gap(directory: Path) -> list[float]:
    """Per step: the largest distance of an agent's baseline from its mean reward over `SPAN` steps."""
    gaps: list[list[float]] = []
    for agent in ("player0", "player1"):
        rewards = series(directory, "orchestrator", REWARD.format(agent))
        baselines = series(directory, "orchestrator", f"algo/kuhn_poker/baseline/{agent}")
        recent = [rewards[max(0, i - SPAN + 1) : i + 1] for i in range(len(rewards))]
        means = [sum(window) / len(window) for window in recent]
        gaps.append([abs(b - m) for b, m in zip(baselines, means, strict=True)])
    return [max(pair) for pair in zip(*gaps, strict=True)]


def ends(values: Sequence[float]) -> tuple[float, float]:
    """The first step, of the policy as it was, and the mean of the last `SPAN` steps."""
    return values[0], sum(values[-SPAN:]) / SPAN


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="*", default=list(CASES), metavar="algorithm")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=Path("outputs/algorithms"))
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    print("| algorithm | its claim | " + " | ".join(f"seed {seed}" for seed in seeds) + " |")
    print("|---|---|" + "---|" * len(seeds))
    missed = 0
    for algorithm in options.algorithms:
        cells = []
        for seed in seeds:
            first, last = ends(curve(algorithm, run(algorithm, seed, options.out)))
            moved = CASES[algorithm].moved(first, last)
            missed += not moved
            cells.append(f"{first:.2f} → {last:.2f}" + ("" if moved else " (missed)"))
        print(f"| `{algorithm}` | {CASES[algorithm].claim} | " + " | ".join(cells) + " |", flush=True)
    return missed


if __name__ == "__main__":
    sys.exit(main())
