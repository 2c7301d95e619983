"""What one looks at while a run goes on, one row a step, gathered from the metric streams."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from prl.tracking.reader import Record


@dataclass(slots=True)
class Row:
    """The watched values of one step; None where no stream has told yet."""

    step: int
    reward: float | None = None
    spread: float | None = None
    truncated: float | None = None
    errors: float | None = None
    off_policy: float | None = None
    wait_for_policy: float | None = None
    loss: float | None = None
    entropy: float | None = None
    mismatch_kl: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    step_time: float | None = None
    wait_for_batch: float | None = None
    trained: bool = False

    @property
    def waits(self) -> str | None:
        """Who waited for whom in this step, and how long."""
        if self.wait_for_batch is None:
            return None
        if self.wait_for_batch >= (self.wait_for_policy or 0.0):
            return f"trainer {self.wait_for_batch:.1f}s"
        return f"rollouts {self.wait_for_policy:.1f}s"


_ROLLOUTS = {
    "reward": r"train/agg/effective/[^/]+/reward/mean",
    "spread": r"train/agg/all/[^/]+/reward/group_spread/mean",
    "truncated": r"train/agg/effective/[^/]+/is_truncated/mean",
    "errors": r"train/agg/all/has_error/mean",
    "off_policy": r"off_policy/max",
    "wait_for_policy": r"time/wait_for_policy",
}
_TRAINING = {
    "loss": r"loss/mean",
    "entropy": r"entropy/all/mean",
    "mismatch_kl": r"mismatch_kl/all/mean",
    "grad_norm": r"optim/grad_norm",
    "tokens_per_second": r"perf/throughput",
    "step_time": r"time/step",
    "wait_for_batch": r"time/wait_for_batch",
}


@dataclass
class Board:
    """Rows by step. `max_steps` is None for a run without an end."""

    max_steps: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    _columns: dict[str, dict[str, str | None]] = field(default_factory=dict)

    def update(self, records: Iterable[Record]) -> list[Row]:
        """Take in new records; returns the rows of the steps whose training they complete, in order."""
        finished: dict[int, Row] = {}
        for record in records:
            if record.resumed_from is not None:
                self._forget_after(record.resumed_from)
            elif record.step is not None and self._take(record):
                finished[record.step] = self.rows[record.step]
        return [row for step, row in sorted(finished.items()) if step in self.rows]

    @property
    def last(self) -> Row | None:
        """The newest step that any stream has told about."""
        return self.rows[max(self.rows)] if self.rows else None

    @property
    def trained_step(self) -> int:
        """The newest step whose optimizer step is done; 0 before the first."""
        return max((step for step, row in self.rows.items() if row.trained), default=0)

    def curve(self, column: str) -> dict[int, float]:
        """One watched value (a field of `Row`) by step."""
        values = ((step, getattr(row, column)) for step, row in sorted(self.rows.items()))
        return {step: value for step, value in values if value is not None}

    def rewards(self) -> dict[int, float]:
        """Mean training reward by step."""
        return self.curve("reward")

    def losses(self) -> dict[int, float]:
        """Mean loss by step."""
        return self.curve("loss")

    def _take(self, record: Record) -> bool:
        """Fill the row of the record's step; True if this record completed it."""
        assert record.step is not None
        watched = self._watched(record)
        completes = "optim/lr" in record.values
        if not watched and not completes:
            return False
        row = self.rows.setdefault(record.step, Row(record.step))
        for column, value in watched.items():
            setattr(row, column, value)
        completes = completes and not row.trained
        row.trained = row.trained or completes
        return completes

    def _watched(self, record: Record) -> dict[str, float]:
        columns = self._columns.setdefault(record.producer, {})
        patterns = _ROLLOUTS if record.producer == "orchestrator" else _TRAINING
        for name in record.values.keys() - columns.keys():
            columns[name] = _column(name, patterns)
        return {column: record.values[name] for name in record.values if (column := columns[name])}

    def _forget_after(self, step: int) -> None:
        self.rows = {known: row for known, row in self.rows.items() if known <= step}


def _column(name: str, patterns: dict[str, str]) -> str | None:
    return next((column for column, pattern in patterns.items() if re.fullmatch(pattern, name)), None)
