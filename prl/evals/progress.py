"""How far an evaluation is, in a file that the launcher shows: `progress.json`, replaced as a whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

from prl.run_dir import RunDir, write_atomic

WRITE_SECONDS = 0.5


@dataclass(slots=True)
class Count:
    """One environment at one checkpoint."""

    total: int
    done: int = 0
    running: int = 0
    errors: int = 0
    reward_sum: float = 0.0
    rewarded: int = 0

    @property
    def mean(self) -> float | None:
        """Mean reward so far, over all agents; None before the first."""
        return self.reward_sum / self.rewarded if self.rewarded else None

    def add(self, rewards: list[float], failed: bool) -> None:
        """Count one more finished rollout."""
        self.done += 1
        self.errors += failed
        self.reward_sum += sum(rewards)
        self.rewarded += len(rewards)


@dataclass
class Progress:
    """Counts by (step, environment). `note` says what goes on before rollouts start."""

    counts: dict[tuple[int, str], Count] = field(default_factory=dict)
    note: str = ""

    def write(self, path: Path) -> None:
        rows = [{"step": step, "env": env, **dataclasses.asdict(c)} for (step, env), c in self.counts.items()]
        write_atomic(path, json.dumps({"note": self.note, "rows": rows}))

    @classmethod
    def read(cls, path: Path) -> Progress | None:
        """What was written last; None before the first time."""
        try:
            tree = json.loads(path.read_text())
        except FileNotFoundError:
            return None
        counts = {(row.pop("step"), row.pop("env")): Count(**row) for row in tree["rows"]}
        return cls(counts, tree["note"])

    async def keep_writing(self, path: Path) -> None:
        """Write now and every half second, until cancelled."""
        while True:
            await asyncio.to_thread(self.write, path)
            await asyncio.sleep(WRITE_SECONDS)


def progress_file(run: RunDir) -> Path:
    return run.configs / "progress.json"
