"""Metrics of a step of supervised fine-tuning, besides those of the trainer."""

from __future__ import annotations

import time
from collections import Counter, deque

from prl.orchestrator.cost import RowCost
from prl.records import MicroBatch
from prl.sft.feed import Feed
from prl.trainer.distributed import World, all_gather_json
from prl.trainer.engine import TrainEngine
from prl.trainer.flops import model_cost, peak_flops, training_flops

WINDOW = 10
"""Steps over which speed is averaged."""


class Speed:
    """Tokens and arithmetic per second over the last steps, waiting and saving included."""

    def __init__(self, engine: TrainEngine) -> None:
        self._world = engine.world
        self._cost: RowCost = model_cost(engine.model.config)
        self._peak = peak_flops(engine.device)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)

    def step(self, rows: list[MicroBatch], seconds: float) -> dict[str, float]:
        """`perf/*` (MFU in percent) after a step of `seconds` on this rank's `rows`. Collective."""
        documents = [true_lengths(row) for row in rows]
        flops = training_flops(self._cost, documents)
        ranks = all_gather_json([sum(map(sum, documents)), flops], self._world)
        found = ranks[:: self._world.sequence]
        self._steps.append((sum(f[0] for f in found), sum(f[1] for f in found), seconds))
        tokens, flops, seconds = (sum(column) for column in zip(*self._steps, strict=True))
        throughput = tokens / seconds
        told = {"perf/throughput": throughput, "perf/throughput_per_gpu": throughput / self._world.size}
        if self._peak:
            told["perf/mfu"] = 100 * flops / seconds / self._world.size / self._peak
        return told


def true_lengths(row: MicroBatch) -> list[int]:
    """Lengths of the documents of a row, without padding and fillers."""
    return [size for size, env in zip(row.sequence_lengths, row.envs, strict=True) if env]


def progress(feed: Feed, world: World) -> dict[str, float]:
    """`progress/*`: what was trained on since the run began, over all ranks. Collective."""
    total: Counter[str] = Counter()
    for counters in all_gather_json(dict(feed.counters), world)[:: world.sequence]:
        total.update(counters)
    told: dict[str, float] = {
        "progress/num_samples": total["samples"],
        "progress/num_tokens": total["tokens"],
        "progress/num_learned_tokens": total["learned"],
        "progress/num_skipped": total["skipped"],
        "progress/num_truncated": total["truncated"],
    }
    if size := feed.reader.documents.size:
        told["progress/epoch"] = (total["samples"] + total["skipped"]) / size
    parts = feed.reader.documents.parts
    for part in parts if len(parts) > 1 else ():
        told[f"progress/{part}/ratio_samples"] = total[f"samples/{part}"] / max(total["samples"], 1)
        told[f"progress/{part}/ratio_tokens"] = total[f"tokens/{part}"] / max(total["tokens"], 1)
    return told


class Clock:
    """Seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

    def total(self) -> float:
        return time.perf_counter() - self.started
